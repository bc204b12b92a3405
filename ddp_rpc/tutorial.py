"""DDP combined with RPC. The parameter server (ps) holds an embedding table, and the trainers look
up its rows by RPC. Each trainer also holds a copy of a linear layer, and DistributedDataParallel
(DDP) keeps the copies equal.

    python tutorial.py                            # ranks 0, 1: trainers; 2: master; 3: ps
    python tutorial.py --world_size 4 --rank 0    # only rank 0; start the other ranks likewise

Why RPC in addition to DDP? DDP copies a model to all trainers. The linear layer is small, so copies
are cheap. But a large table may not even fit into a trainer. So it stays in one place, and the
trainers call it there.

PyTorch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework" (text of
2020-12-10, code and order of 2025-08). "Difference 7" is number 7 in docs/differences/ddp_rpc.md.
"""

import argparse
import logging
import os
import random
import sys
import threading
import warnings

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.optim as optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, TensorPipeRpcBackendOptions
from torch.nn.parallel import DistributedDataParallel as DDP

NUM_EMBEDDINGS = 100
EMBEDDING_DIM = 16

warnings.filterwarnings("ignore", message="You are using a Backend")  # torch itself does this
# This hides a remark of DistributedOptimizer, that the GIL may slow down the class SGD below.
logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)

# Random targets, as in the text, cannot be learned. Here each index has a weight for each class,
# and the target of a bag of indices is the class with the largest sum (difference 8).
TEACHER = torch.randn(NUM_EMBEDDINGS, 8, generator=torch.Generator().manual_seed(0))


def get_device(number, num_gpus):
    """Return GPU `number`, counted from 0. If there are fewer, return the last one, or else the
    CPU. GPU means CUDA here, because DDP uses Gloo, which supports no other."""
    count = min(num_gpus, torch.cuda.device_count())
    return torch.device("cuda", min(number, count - 1)) if count else torch.device("cpu")


class HybridModel(torch.nn.Module):
    """A linear layer, here, on top of an embedding table, which is on the parameter server.

    The model holds only a reference to the table, an RRef. So parameters() returns those of the
    linear layer.
    """

    def __init__(self, emb_rref, device):
        super().__init__()
        self.emb_rref = emb_rref
        # DDP starts all copies with the weights of trainer 0. In backward(), it averages their
        # gradients over the trainers.
        self.fc = DDP(torch.nn.Linear(EMBEDDING_DIM, 8).to(device))
        self.device = device

    def forward(self, indices, offsets):
        """Return the logits (B, 8) of B bags, given all their indices and the offset of each
        bag."""
        # The lookup runs on one of the server's RPC threads (16 by default). At the same time,
        # other trainers look up rows and change them. The tutorial accepts that, and it works.
        emb_lookup = self.emb_rref.rpc_sync().forward(indices, offsets)  # (B, 16), on the CPU
        return self.fc(emb_lookup.to(self.device))


class SGD(optim.SGD):
    """The optimizer. It has to be a subclass. If DistributedOptimizer got optim.SGD itself, it
    would use a version that takes no lock, and the trainers' updates could overlap (difference
    20)."""


def _retrieve_embedding_parameters(emb_rref):
    """Return RRefs to the table's parameters. Runs on the server, and needs no lock, because it
    only reads."""
    param_rrefs = []
    for param in emb_rref.local_value().parameters():
        param_rrefs.append(RRef(param))
    return param_rrefs


def _run_trainer(emb_rref, rank, num_gpus):
    """Train. The master calls it in each trainer, where it runs on an RPC thread.

    A step goes forward through the table, by RPC, and through the linear layer, and then back. DDP
    averages the gradient of the linear layer over the trainers, and distributed autograd carries
    the gradient of the table to the server.
    """
    device = get_device(rank, num_gpus)
    if num_gpus:
        print(f"Trainer {rank} uses {device}", flush=True)
    if device.type == "cuda":
        # Of this thread: a new thread begins on GPU 0. The step of the linear layer runs on another
        # thread, but uses only tensors of this GPU, and torch itself changes to their GPU for each
        # operation. (This is from torch's source, and has not been run on several GPUs.)
        torch.cuda.set_device(device)
    model = HybridModel(emb_rref, device)

    # DistributedOptimizer takes a list with an RRef to each parameter. These are the table's.
    model_parameter_rrefs = rpc.rpc_sync("ps", _retrieve_embedding_parameters, args=(emb_rref,))
    # Parameters of this process need RRefs, too.
    for param in model.parameters():
        model_parameter_rrefs.append(RRef(param))

    # This makes an SGD in each process that owns some of the parameters.
    opt = DistributedOptimizer(SGD, model_parameter_rrefs, lr=0.5)  # difference 11

    criterion = torch.nn.CrossEntropyLoss()

    def get_next_batch():
        for _ in range(10):
            num_indices = random.randint(20, 50)
            indices = torch.LongTensor(num_indices).random_(0, NUM_EMBEDDINGS)

            # cut them into bags of 1 to 10
            offsets = []
            start = 0
            while start < num_indices:
                offsets.append(start)
                start += random.randint(1, 10)

            offsets_tensor = torch.LongTensor(offsets)
            votes = torch.nn.functional.embedding_bag(indices, TEACHER, offsets_tensor, mode="sum")
            target = votes.argmax(dim=1).to(device)
            yield indices, offsets_tensor, target

    for epoch in range(100):
        total_loss, correct, bags = 0.0, 0, 0
        for indices, offsets, target in get_next_batch():
            # The context records the calls inside it, so that backward() can go through them. In
            # each process, it keeps the gradients of this iteration, under the id context_id.
            with dist_autograd.context() as context_id:
                output = model(indices, offsets)
                loss = criterion(output, target)

                # Go backward: here, with DDP's average, and then on the server.
                dist_autograd.backward(context_id, [loss])

                # Each trainer changes the table with its own gradient, because DDP averages only
                # the gradients of the layer that it wraps (difference 14).
                opt.step(context_id)

                # No zero_grad() is needed, because the next step() overwrites .grad with the
                # gradients of its own context.
            total_loss += loss.item() * len(target)
            correct += (output.argmax(dim=1) == target).sum().item()
            bags += len(target)
        # Each batch is new, and its answers are counted before the model learns from it. So what
        # the model has memorized does not raise this accuracy.
        result = f"loss {total_loss / bags:.3f}, accuracy {correct / bags:.3f} (guessing: 0.125)"
        print(f"Training done for epoch {epoch}: {result}", flush=True)


def run_worker(rank, args):
    """Do the work of one rank."""
    if parent := mp.parent_process():  # a spawned rank ends when its parent ends
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)  # such small operations are slower with more threads
    torch.manual_seed(args.seed + rank)
    random.seed(args.seed + rank)
    num_trainers = args.world_size - 2

    # As in the tutorial, init_rpc and init_process_group use two ports. (One would do here, because
    # the same process is rank 0 of both.) MASTER_PORT is the port of the process group.

    # TCP instead of shared memory, and no channels for GPUs: private to torch (docs/COSTS.md).
    rpc_backend_options = TensorPipeRpcBackendOptions(
        init_method=f"tcp://{args.master_addr}:{args.master_port + 1}",
        _transports=["uv"],
        _channels=["basic"],
    )

    # The last two ranks are master and ps, and all others are trainers.
    if rank == num_trainers:
        rpc.init_rpc(
            "master",
            rank=rank,
            world_size=args.world_size,
            rpc_backend_options=rpc_backend_options,
        )

        # The table, which stays on the ps.
        emb_rref = rpc.remote(
            "ps",
            torch.nn.EmbeddingBag,
            args=(NUM_EMBEDDINGS, EMBEDDING_DIM),
            kwargs={"mode": "sum"},
        )

        # Let all trainers train at the same time.
        futs = []
        for trainer_rank in range(num_trainers):
            trainer_name = f"trainer{trainer_rank}"
            fut = rpc.rpc_async(
                trainer_name,
                _run_trainer,
                args=(emb_rref, trainer_rank, args.num_gpus),
                timeout=0,  # no limit: the default is 60 seconds (difference 3)
            )
            futs.append(fut)

        # Wait for all of them, or raise the first error. If a trainer fails, the others wait for it
        # in DDP. So waiting for one Future after the other could last forever.
        torch.futures.wait_all(futs)
    elif rank < num_trainers:
        # DDP needs a process group. Only the trainers are in it.
        dist.init_process_group(backend="gloo", rank=rank, world_size=num_trainers)

        # All ranks are in the RPC group.
        trainer_name = f"trainer{rank}"
        rpc.init_rpc(
            trainer_name,
            rank=rank,
            world_size=args.world_size,
            rpc_backend_options=rpc_backend_options,
        )

        # The main thread has nothing more to do, because an RPC thread runs _run_trainer.
    else:
        rpc.init_rpc(
            "ps",
            rank=rank,
            world_size=args.world_size,
            rpc_backend_options=rpc_backend_options,
        )
        # Here, too, RPC threads do the work. They answer the master and the trainers.

    # Block until all ranks have come here and all RPCs have finished.
    rpc.shutdown()

    # Close the connections of DDP.
    if rank < num_trainers:
        dist.destroy_process_group()


def parse_args():
    parser = argparse.ArgumentParser(description="DDP combined with RPC")
    parser.add_argument("--world_size", type=int, default=4, help="trainers, master and ps (4)")
    parser.add_argument("--rank", type=int, help="start only this rank")
    parser.add_argument("--num_gpus", type=int, default=0, help="GPUs, at most one per trainer (0)")
    parser.add_argument("--master_addr", default="localhost", help="host of rank 0 (localhost)")
    parser.add_argument("--master_port", type=int, default=29500, help="first of two free ports")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    args = parser.parse_args()
    if args.world_size < 3:
        parser.error("--world_size must be 3 or more: at least one trainer, the master and the ps")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank must be from 0 to {args.world_size - 1}")
    if args.num_gpus < 0:
        parser.error("--num_gpus must be 0 or more")
    return args


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # else torch may wait 10 s for DNS
    if args.master_addr in ("localhost", "127.0.0.1"):
        # RPC and Gloo on loopback only; torch's stores listen on all interfaces (docs/CLUSTERS.md).
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.update(TP_SOCKET_IFNAME=loopback, GLOO_SOCKET_IFNAME=loopback)
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
        print("Distributed RPC example completed successfully.")
    else:
        run_worker(args.rank, args)  # one rank in this terminal
