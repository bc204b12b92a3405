"""Count how often the tutorial on batch processing loses a gradient, or answers with a model that is half updated.

    python tools/published_batch.py --trainers 5 --batch_update_size 1 --side 256

The model consists of six equal square matrices, and every gradient consists of ones. So the sum of n gradients must be
n everywhere, and all numbers of a model that a trainer gets must be equal. A model with different numbers is called
torn. Four variants are measured in turn. Gradients are added before the lock is taken (the published code) or under
it (the text of the page). The answer is the server's model itself (both of them) or a copy of it (tutorial_batch.py).
"""

import argparse
import copy
import itertools
import os
import pathlib
import sys
import threading
import warnings

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "harness"))

from jobs import free_port

warnings.filterwarnings("ignore", message="You are using a Backend")
MATRICES = 6


class Server:
    """The parameter server of the tutorial, which also counts the updates whose sum of gradients is wrong."""

    def __init__(self, args, under_lock, answer_copy):
        self.size, self.under_lock, self.answer_copy = args.batch_update_size, under_lock, answer_copy
        self.model = nn.ParameterList(torch.zeros(args.side, args.side) for _ in range(MATRICES))
        self.optimizer = optim.SGD(self.model.parameters(), lr=1.0)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.lock = threading.Lock()
        self.count = self.updates = self.wrong = 0
        self.answer = torch.futures.Future()

    def add(self, grads):
        for p, g in zip(self.model.parameters(), grads, strict=True):
            p.grad += g

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(server_rref, grads):
        """Add a trainer's gradients; return a Future of the model after the update.

        Several trainers may call this at the same time.
        """
        self = server_rref.local_value()
        if not self.under_lock:
            self.add(grads)
        with self.lock:
            if self.under_lock:
                self.add(grads)
            self.count += 1
            answer = self.answer
            if self.count == self.size:
                self.wrong += any(bool((p.grad != self.size).any()) for p in self.model.parameters())
                for p in self.model.parameters():
                    p.grad.fill_(self.size)  # corrected, because a wrong sum would make later models look torn
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.count, self.answer = 0, torch.futures.Future()
                self.updates += 1
                answer.set_result(copy.deepcopy(self.model) if self.answer_copy else self.model)
        return answer


def run_trainer(server_rref, args):
    """Send gradients of ones; return how many of the models in the answers are torn."""
    grads = [torch.ones(args.side, args.side)] * MATRICES
    torn = 0
    for _ in range(args.gradients):
        model = rpc.rpc_sync(server_rref.owner(), Server.update_and_fetch_model, args=(server_rref, grads), timeout=0)
        first = next(iter(model))[0, 0]
        torn += any(bool((p != first).any()) for p in model)
    return torn


def run_rank(rank, args):
    torch.set_num_threads(1)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=args.trainers + 1)
    if rank == 0:
        for under_lock, answer_copy in itertools.product((False, True), repeat=2):
            server = Server(args, under_lock, answer_copy)
            server_rref = rpc.RRef(server)
            trainers = range(1, args.trainers + 1)
            calls = [rpc.rpc_async(f"rank{r}", run_trainer, args=(server_rref, args), timeout=0) for r in trainers]
            torn = sum(torch.futures.wait_all(calls))
            place = "under the lock" if under_lock else "before the lock"
            answer = "a copy" if answer_copy else "the model itself"
            text = (
                f"wrong sums {server.wrong} of {server.updates}, torn models {torn} of {args.trainers * args.gradients}"
            )
            print(f"added {place}, answer {answer}: {text}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=5)
    parser.add_argument("--batch_update_size", type=int, default=5, help="gradients in an update")
    parser.add_argument("--side", type=int, default=256, help="rows and columns of each matrix")
    parser.add_argument("--gradients", type=int, default=100, help="gradients that each trainer sends")
    args = parser.parse_args()
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(free_port())
    mp.spawn(run_rank, args=(args,), nprocs=args.trainers + 1)
