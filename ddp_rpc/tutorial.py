"""PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework".

    python tutorial.py                            # ranks 0, 1: trainers; 2: master; 3: server
    python tutorial.py --world_size 4 --rank 0    # only rank 0; start the other ranks likewise

The parameter server holds an embedding table, and the trainers look up its rows by RPC. Each
trainer has a replica of a linear layer; DistributedDataParallel (DDP) keeps the replicas equal.
The master creates the table and starts the trainers. single.py does the same job in one process.
This file follows the edition of 2020-12-10. "Difference 8" is number 8 in DIFFERENCES.md.
A bag is a list of indices; an embedding bag is the sum of their rows of the table.
Shapes: B bags in a batch, I indices in a batch, D numbers in a row of the table, C classes.
"""

import argparse
import logging
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

NUM_EMBEDDINGS = 100
EMBEDDING_DIM = 16
NUM_CLASSES = 8
EPOCHS = 10
BATCHES = 100  # for each trainer in each epoch (difference 19)
BATCH_BAGS = 32
LEARNING_RATE = 0.5  # difference 11
# The tutorial's targets are random, so a model cannot learn them. In this file each index has a
# fixed weight for each class. The target of a bag is the class with the largest sum (difference 8).
TEACHER = torch.randn(NUM_EMBEDDINGS, NUM_CLASSES, generator=torch.Generator().manual_seed(0))


class SGD(torch.optim.SGD):
    """DistributedOptimizer replaces torch's own SGD by a deprecated class (difference 20)."""


class HybridModel(torch.nn.Module):
    """A sparse part, the nn.EmbeddingBag on the server, and a dense part, the nn.Linear in DDP."""

    def __init__(self, emb_rref):
        super().__init__()
        self.emb_rref = emb_rref
        # DDP copies the weights of trainer 0 to all trainers, and averages gradients in backward.
        self.fc = DDP(torch.nn.Linear(EMBEDDING_DIM, NUM_CLASSES))

    def forward(self, indices, offsets):
        """Return the logits [B, C] of bags, given as indices [I] and each bag's offset [B]."""
        # All trainers look up rows at the same time, without a lock. A lookup may see only a part
        # of another trainer's update. Its backward pass is still right: it does not use the rows.
        emb_lookup = self.emb_rref.rpc_sync().forward(indices, offsets)  # [B, D]
        return self.fc(emb_lookup)


def _retrieve_embedding_parameters(emb_rref):
    """Return RRefs to the table's parameters. Needs no lock: it changes nothing."""
    return [rpc.RRef(param) for param in emb_rref.local_value().parameters()]


def get_next_batch(num_bags):
    """Return a batch of bags of 1 to 10 indices: indices [I], offsets [B], target [B]."""
    sizes = torch.randint(1, 11, (num_bags,))
    offsets = sizes.cumsum(dim=0) - sizes
    indices = torch.randint(NUM_EMBEDDINGS, (int(sizes.sum()),))
    votes = torch.nn.functional.embedding_bag(indices, TEACHER, offsets, mode="sum")  # [B, C]
    return indices, offsets, votes.argmax(dim=1)


def _run_trainer(emb_rref, rank, seed):
    """Train; return this trainer's fc as one vector. The master calls it once in each trainer."""
    torch.manual_seed(1000 * seed + rank + 1)  # different batches in each trainer (difference 10)
    model = HybridModel(emb_rref)
    # DistributedOptimizer needs an RRef to each parameter, also to those of fc in this process.
    model_parameter_rrefs = rpc.rpc_sync("ps", _retrieve_embedding_parameters, args=(emb_rref,))
    model_parameter_rrefs += [rpc.RRef(param) for param in model.parameters()]
    opt = DistributedOptimizer(SGD, model_parameter_rrefs, lr=LEARNING_RATE)
    criterion = torch.nn.CrossEntropyLoss()
    test_indices, test_offsets, test_target = get_next_batch(2000)  # not used for training
    for epoch in range(EPOCHS):
        for _ in range(BATCHES):
            indices, offsets, target = get_next_batch(BATCH_BAGS)
            # A context records the RPCs inside it, so that backward also runs on the server. In
            # each process it has gradients of its own, so there is no zero_grad().
            with dist_autograd.context() as context_id:
                output = model(indices, offsets)
                loss = criterion(output, target)
                # DDP averages the gradients of fc over the trainers. It does not average those of
                # the table: each trainer updates the table with its own gradient (difference 14).
                dist_autograd.backward(context_id, [loss])
                opt.step(context_id)
        # When all trainers have finished the epoch, trainer 0 evaluates. The others cannot update
        # the table meanwhile, because their next backward waits for the gradients of trainer 0.
        dist.barrier()
        if rank == 0:
            with torch.no_grad():
                output = model(test_indices, test_offsets)
                loss = criterion(output, test_target)
                accuracy = (output.argmax(dim=1) == test_target).double().mean()
            result = f"held-out loss {loss:.3f}, accuracy {accuracy:.3f} (chance 0.125, teacher 1)"
            print(f"Training done for epoch {epoch}: {result}", flush=True)
    return torch.nn.utils.parameters_to_vector(model.fc.parameters()).detach()


def run_worker(rank, args):
    """Initialize RPC, do the work of this rank, and shut RPC down."""
    torch.set_num_threads(1)  # the ranks share the cores of one machine
    # Hide two harmless messages of torch: a warning of init_rpc, and a note about SGD subclasses.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    num_trainers = args.world_size - 2
    # torch's default transport, shared memory, keeps a core busy for every rank, so all ranks are
    # slow if cores are few. TCP ("uv") does not. _transports is private to torch (difference 24).
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    if rank == num_trainers:
        rpc.init_rpc("master", rank=rank, world_size=args.world_size, rpc_backend_options=options)
        table_size = (NUM_EMBEDDINGS, EMBEDDING_DIM)
        emb_rref = rpc.remote("ps", torch.nn.EmbeddingBag, table_size, kwargs={"mode": "sum"})
        # Run the training loop on the trainers. timeout=0 means no time limit (difference 3).
        futs = []
        for trainer_rank in range(num_trainers):
            trainer_args = (emb_rref, trainer_rank, args.seed)
            fut = rpc.rpc_async(f"trainer{trainer_rank}", _run_trainer, trainer_args, timeout=0)
            futs.append(fut)
        # Wait for all trainers, or raise the error of the first that fails (difference 7).
        replicas = torch.futures.wait_all(futs)
        if any(not torch.equal(replica, replicas[0]) for replica in replicas):
            raise RuntimeError("the trainers' replicas of fc differ")
        print(f"The replicas of fc are identical. Number of trainers: {num_trainers}")
    elif rank < num_trainers:
        # For DDP. RPC can use the same port: trainer 0 is rank 0 of both groups (difference 5).
        dist.init_process_group(backend="gloo", rank=rank, world_size=num_trainers)
        name = f"trainer{rank}"
        rpc.init_rpc(name, rank=rank, world_size=args.world_size, rpc_backend_options=options)
        # An RPC thread runs _run_trainer. Meanwhile this thread waits in rpc.shutdown.
    else:
        torch.manual_seed(args.seed)  # for the table, which is made in this process (difference 10)
        rpc.init_rpc("ps", rank=rank, world_size=args.world_size, rpc_backend_options=options)
        # The parameter server has no loop: its RPC threads answer the calls of the trainers.
    rpc.shutdown()  # waits until all ranks have called it and no call is left
    if rank < num_trainers:
        dist.destroy_process_group()


def parse_args():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--world_size", type=int, default=4, help="trainers, 1 master, 1 server")
    parser.add_argument("--rank", type=int, help="the rank to start; without it, all ranks")
    parser.add_argument("--master_addr", default="localhost", help="address of rank 0's machine")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port on it")
    parser.add_argument("--seed", type=int, default=1, help="the same on every rank")
    args = parser.parse_args()
    if args.world_size < 3:
        parser.error("--world_size must be 3 or more: 1 trainer, 1 master, 1 parameter server")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank must be at least 0 and less than --world_size {args.world_size}")
    return args


if __name__ == "__main__":
    # RPC sends the name __main__._run_trainer. It exists in every rank: all ranks run this file.
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    if args.master_addr in ("localhost", "127.0.0.1"):
        # Anyone who can connect to a rank can run code in it. So RPC and Gloo listen on the
        # loopback interface only (difference 23). The store, at --master_port, listens on all.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # one process per rank
    else:
        run_worker(args.rank, args)  # only this rank

# If a rank dies, ranks in other terminals may wait forever. If the port is in use, rank 0 fails.
# A run cannot be resumed. See "What main.py adds" in README.md.
