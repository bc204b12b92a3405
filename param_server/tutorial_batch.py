"""PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions", first part.

It follows the page of 2025-06-23 and its code in pytorch/examples. [B1] refers to point 1 of "The
batch page" in DIFFERENCES.md. Rank 0 is the server ("ps") and has the model. All other ranks are
trainers: each sends the gradients of one batch, and gets the model after the next update. With
batching, an update uses one gradient of each trainer. Without it, each gradient makes an update.

python tutorial_batch.py                            # a server and five trainers, on this machine
python tutorial_batch.py --no_batch                 # the same without batching
python tutorial_batch.py --world_size 3 --rank 0    # only one rank: the server
python tutorial_batch.py --plot batch.png           # measures 1 to 5 trainers, with and without
"""

import argparse
import copy
import os
import statistics
import sys
import threading
import time
import warnings
from datetime import datetime

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn, optim

warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's own use of Gloo

batch_size = 20
image_w = 64
image_h = 64
num_classes = 30


def timed_log(text):
    print(f"{datetime.now().strftime('%H:%M:%S')} {text}", flush=True)


class BatchUpdateParameterServer:
    def __init__(self, batch_update_size):
        layers = [nn.Flatten(), nn.Linear(3 * image_h * image_w, 64), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(64, num_classes))  # the page: resnet50 [B5]
        self.lock = threading.Lock()  # held while the model, its gradients or the counts change
        self.future_model = torch.futures.Future()
        self.batch_update_size = batch_update_size
        self.curr_update_size = 0
        self.updates = 0
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)

    def get_model(self):
        """Return a copy of the model. All trainers call this, at any time (locked)."""
        with self.lock:
            return copy.deepcopy(self.model)

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(ps_rref, grads):
        """Add a trainer's gradients. Return a Future of the model after the update with them.

        All trainers call this at once (locked). Because of async_execution, a trainer gets the
        Future's value when it is set. Until then it does not block an RPC thread of the server.
        """
        self = ps_rref.local_value()
        with self.lock:
            for p, g in zip(self.model.parameters(), grads, strict=True):
                p.grad += g  # under the lock, so that no addition is lost [B1]
            self.curr_update_size += 1
            fut = self.future_model
            complete = self.curr_update_size == self.batch_update_size
            if complete:
                for p in self.model.parameters():
                    p.grad /= self.batch_update_size
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)  # zeros: the next ones are added
                self.curr_update_size = 0
                self.updates += 1
                self.future_model = torch.futures.Future()
                # A copy, because RPC reads it later, maybe during the next update [B2].
                model = copy.deepcopy(self.model)
        if complete:
            fut.set_result(model)  # not under the lock, because it sends all answers
        return fut


class Trainer:
    def __init__(self, ps_rref, seed, num_batches):
        self.ps_rref = ps_rref
        self.loss_fn = nn.MSELoss()
        self.num_batches = num_batches
        generator = torch.Generator().manual_seed(seed)  # the same patterns for all trainers
        self.patterns = torch.randn(num_classes, 3, image_h, image_w, generator=generator)
        self.generator = torch.Generator().manual_seed(seed + rpc.get_worker_info().id)

    def get_next_batch(self):
        """Yield images (B, 3, H, W), patterns with noise, and labels (B, classes) [B6]."""
        for _ in range(self.num_batches):
            indices = torch.randint(0, num_classes, (batch_size,), generator=self.generator)
            noise = torch.randn(batch_size, 3, image_h, image_w, generator=self.generator)
            yield self.patterns[indices] / 2 + noise, F.one_hot(indices, num_classes).float()

    def train(self):
        """Return the loss of the last batch."""
        name = rpc.get_worker_info().name
        m = self.ps_rref.rpc_sync().get_model()
        for i, (inputs, labels) in enumerate(self.get_next_batch()):
            loss = self.loss_fn(m(inputs), labels)
            loss.backward()
            if i % 10 == 0:
                timed_log(f"{name} batch {i} loss {loss.item():.5f}")
            m = rpc.rpc_sync(
                self.ps_rref.owner(),
                BatchUpdateParameterServer.update_and_fetch_model,
                args=(self.ps_rref, [p.grad for p in m.parameters()]),
                timeout=0,  # no time limit: it waits for the slowest trainer
            )
        return loss.item()


def run_trainer(ps_rref, seed, num_batches):
    """Train in this process. The server calls this once on each trainer."""
    return Trainer(ps_rref, seed, num_batches).train()


def run_ps(trainers, args):
    """Return the seconds that the training took."""
    torch.manual_seed(args.seed)
    ps = BatchUpdateParameterServer(1 if args.no_batch else len(trainers))
    ps_rref = rpc.RRef(ps)
    timed_log("Start training")
    start = time.perf_counter()
    futs = []
    for trainer in trainers:
        work = (ps_rref, args.seed, args.num_batches)
        futs.append(rpc.rpc_async(trainer, run_trainer, args=work, timeout=0))  # no limit [B7]
    loss = statistics.mean(torch.futures.wait_all(futs))
    seconds = time.perf_counter() - start
    timed_log(f"Finish training: {ps.updates} updates, {seconds:.1f} s")
    print(f"Loss {loss:.5f} (guessing: {(num_classes - 1) / num_classes**2:.5f})", flush=True)
    return seconds


def run_worker(rank, args, seconds=None):
    """Run one rank in this process. `seconds`: a queue that gets the time of the training."""
    torch.set_num_threads(1)  # the ranks share the cores
    name = f"trainer{rank}" if rank else "ps"
    # torch's default transport, shared memory, keeps a core busy for every rank, so all ranks are
    # slow if cores are few. TCP ("uv") does not. _transports is private to torch [B12].
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    rpc.init_rpc(name, rank=rank, world_size=args.world_size, rpc_backend_options=options)
    if rank == 0:
        took = run_ps([f"trainer{r}" for r in range(1, args.world_size)], args)
        if seconds:
            seconds.put(took)
    rpc.shutdown()  # in a trainer, an RPC thread runs run_trainer meanwhile


def measure(args):
    """Draw the time of the training over the number of trainers, with and without batching."""
    import matplotlib.pyplot as plt  # imported only here: the ranks do not need it

    trainers = range(1, args.world_size)
    medians = {"with batching": [], "without batching": []}
    for n in trainers:
        for label in medians:
            case = copy.copy(args)
            case.world_size = n + 1
            case.no_batch = label == "without batching"
            seconds = mp.get_context("spawn").SimpleQueue()
            times = []
            for _ in range(args.repeats):
                mp.spawn(run_worker, args=(case, seconds), nprocs=case.world_size)
                times.append(seconds.get())
            medians[label].append(statistics.median(times))
            spread = f"({min(times):.2f} to {max(times):.2f})"
            print(f"Trainers {n}, {label}: {medians[label][-1]:.2f} s {spread}", flush=True)
    for label, times in medians.items():
        plt.plot(trainers, times, marker="o", label=label)
    plt.xlabel("trainers")
    plt.ylabel(f"seconds for {args.num_batches} batches of each trainer")
    plt.legend()
    plt.savefig(args.plot)


def parse_args():
    parser = argparse.ArgumentParser(description="Batch-updating parameter server")
    parser.add_argument("--world_size", type=int, default=6, help="ranks: server and trainers (6)")
    parser.add_argument("--rank", type=int, help="start only this rank; 0 is the server")
    parser.add_argument("--master_addr", default="localhost", help="host of rank 0 (localhost)")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port on it (29500)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    parser.add_argument("--num_batches", type=int, default=50, help="per trainer (50)")
    parser.add_argument("--no_batch", action="store_true", help="one update per gradient")
    parser.add_argument("--plot", metavar="FILE.png", help="measure, and draw the times")
    parser.add_argument("--repeats", type=int, default=3, help="--plot: runs of each kind (3)")
    args = parser.parse_args()
    if args.world_size < 2:
        parser.error("--world_size must be 2 or more: the server and at least one trainer")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank must be from 0 to {args.world_size - 1}")
    if args.num_batches < 1 or args.repeats < 1:
        parser.error("--num_batches and --repeats must be 1 or more")
    if args.plot and args.rank is not None:
        parser.error("--plot starts all ranks on this machine: leave out --rank")
    return args


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    if args.master_addr in ("localhost", "127.0.0.1"):
        # Anyone who can connect to a rank can run code in it. So RPC listens on the loopback
        # interface only [B11]. The store, at --master_port, still listens on all interfaces.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # init_rpc uses Gloo for a moment
    # RPC sends functions and classes by name. Every rank finds them in this file, its main module.
    if args.plot:
        measure(args)
    elif args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_worker(args.rank, args)  # one rank in this terminal

# If a trainer dies, spawned ranks end, but ranks in terminals wait forever. Nothing is saved.
# main.py --mode replica --consistency sync makes the same kind of update. It can continue without
# a lost trainer (--on_lost continue), and from a file (--checkpoint, --resume).
