"""A parameter server that waits for all trainers. Each trainer sends the gradients of one batch.
When all have come, the server makes one update with their mean, and answers with the new model.
With --no_batch, it makes a separate update for each gradient.

    python tutorial_batch.py                            # starts a server and five trainers here
    python tutorial_batch.py --no_batch                 # the same without batching
    python tutorial_batch.py --world_size 3 --rank 0    # only one rank: the server

Why RPC? DDP could make this update too. The program is here to show `async_execution`. With it, the
calls wait for each other on the server without occupying a thread each.

PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions", first part
(code of 2025-08). "Difference B7" is number B7 in docs/differences/param_server.md.
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

warnings.filterwarnings("ignore", message="You are using a Backend")  # torch itself does this

batch_size = 20
image_w = 64
image_h = 64
num_classes = 30
num_trainers = 5
num_batches = 50
log_interval = 10  # every tenth batch and update writes its lines


def timed_log(text):
    print(f"{datetime.now().strftime('%H:%M:%S')} {text}", flush=True)


class BatchUpdateParameterServer:
    """Trainers call its methods. Such a call runs on one of the server's RPC threads. There are 16
    by default, so several calls may run at the same time."""

    def __init__(self, batch_update_size):
        layers = [nn.Flatten(), nn.Linear(3 * image_h * image_w, 64), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(64, num_classes))  # small (difference B5)
        self.lock = threading.Lock()  # held while the model, its gradients or the counts change
        self.future_model = torch.futures.Future()
        self.batch_update_size = batch_update_size
        self.curr_update_size = 0
        self.updates = 0
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)

    def get_model(self):
        with self.lock:
            return copy.deepcopy(self.model)  # RPC reads the answer after this method has returned

    # A static method with the RRef as an argument, as the tutorial writes it. A method with `self`,
    # called as ps_rref.rpc_sync(timeout=0).update_and_fetch_model(grads), would do the same.
    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch_model(ps_rref, grads):
        """Add a trainer's gradients. Return a Future of the model after the update that has them.

        Because of async_execution, RPC answers the trainer when the Future has its value. Until
        then the trainer waits, but it occupies no thread of the server.
        """
        self = ps_rref.local_value()
        with self.lock:
            logged = self.updates % log_interval == 0
            if logged:
                timed_log(f"PS got {self.curr_update_size}/{self.batch_update_size} updates")
            for p, g in zip(self.model.parameters(), grads, strict=True):
                p.grad += g  # not atomic: without the lock, an addition could get lost
            self.curr_update_size += 1
            fut = self.future_model

            complete = self.curr_update_size >= self.batch_update_size
            if complete:
                for p in self.model.parameters():
                    p.grad /= self.batch_update_size
                self.curr_update_size = 0
                self.updates += 1
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)  # zeros, to which `+=` can add
                # A copy, because RPC reads it later, when the next update may have begun.
                model = copy.deepcopy(self.model)
                self.future_model = torch.futures.Future()
        if complete:
            # This sends the answers to all trainers. The lock is free, so no new call waits for it.
            fut.set_result(model)
            if logged:
                timed_log("PS updated model")
        return fut


class Trainer:
    def __init__(self, ps_rref, seed, num_batches):
        self.ps_rref = ps_rref
        self.loss_fn = nn.MSELoss()
        self.num_batches = num_batches
        self.device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        generator = torch.Generator().manual_seed(seed)  # the same patterns for all trainers
        self.patterns = torch.randn(num_classes, 3, image_h, image_w, generator=generator)
        self.generator = torch.Generator().manual_seed(seed + rpc.get_worker_info().id)

    def get_next_batch(self):
        """Yield images (B, 3, H, W), which are patterns with noise, and labels (B, classes)."""
        for _ in range(self.num_batches):
            indices = torch.randint(0, num_classes, (batch_size,), generator=self.generator)
            noise = torch.randn(batch_size, 3, image_h, image_w, generator=self.generator)
            inputs = self.patterns[indices] / 2 + noise
            labels = F.one_hot(indices, num_classes).float()
            yield inputs.to(self.device), labels.to(self.device)

    def train(self):
        """Return the loss of the last batch."""
        name = rpc.get_worker_info().name
        m = self.ps_rref.rpc_sync().get_model().to(self.device)
        for i, (inputs, labels) in enumerate(self.get_next_batch()):
            logged = i % log_interval == 0
            if logged:
                timed_log(f"{name} processing one batch")
            loss = self.loss_fn(m(inputs), labels)
            loss.backward()
            if logged:
                timed_log(f"{name} reporting grads, loss {loss.item():.5f}")
            m = rpc.rpc_sync(
                self.ps_rref.owner(),
                BatchUpdateParameterServer.update_and_fetch_model,
                args=(self.ps_rref, [p.grad for p in m.cpu().parameters()]),
                timeout=0,  # no time limit: it waits for the slowest trainer
            ).to(self.device)
            if logged:
                timed_log(f"{name} got updated model")
        return loss.item()


def run_trainer(ps_rref, seed, num_batches):
    """The server calls this in each trainer, where it occupies an RPC thread until the end."""
    trainer = Trainer(ps_rref, seed, num_batches)
    return trainer.train()


def run_ps(trainers, args):
    timed_log("Start training")
    start = time.perf_counter()
    ps = BatchUpdateParameterServer(1 if args.no_batch else len(trainers))
    ps_rref = rpc.RRef(ps)
    futs = []
    for trainer in trainers:
        work = (ps_rref, args.seed, args.num_batches)
        futs.append(rpc.rpc_async(trainer, run_trainer, args=work, timeout=0))  # no time limit

    losses = torch.futures.wait_all(futs)
    seconds = time.perf_counter() - start
    timed_log(f"Finish training: {ps.updates} updates, {seconds:.1f} s")
    guessing = (num_classes - 1) / num_classes**2
    print(f"Loss {statistics.mean(losses):.5f} (guessing: {guessing:.5f})", flush=True)


def run_worker(rank, args):
    if parent := mp.parent_process():  # a spawned rank ends when its parent ends
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    # All trainers compute at the same time. With more threads than cores they slow each other down.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    # TCP instead of shared memory, and no channels for GPUs: private to torch (docs/COSTS.md).
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    name = "ps" if rank == 0 else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=args.world_size, rpc_backend_options=options)
    if rank == 0:
        run_ps([f"trainer{r}" for r in range(1, args.world_size)], args)
    # A trainer comes here immediately, and waits for all ranks. Meanwhile one of its RPC threads
    # runs what the server has called.
    rpc.shutdown()


def parse_args():
    parser = argparse.ArgumentParser(description="Batch-updating parameter server")
    size = num_trainers + 1
    parser.add_argument("--world_size", type=int, default=size, help=f"server, trainers ({size})")
    parser.add_argument("--rank", type=int, help="start only this rank; 0 is the server")
    parser.add_argument("--master_addr", default="localhost", help="host of rank 0 (localhost)")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port on it (29500)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    parser.add_argument("--num_batches", type=int, default=num_batches, help="per trainer (50)")
    parser.add_argument("--no_batch", action="store_true", help="one update per gradient")
    args = parser.parse_args()
    if args.world_size < 2:
        parser.error("--world_size must be 2 or more: the server and at least one trainer")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank must be from 0 to {args.world_size - 1}")
    if args.num_batches < 1:
        parser.error("--num_batches must be 1 or more")
    return args


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # else torch may wait 10 s for DNS
    if args.master_addr in ("localhost", "127.0.0.1"):
        # RPC and Gloo on loopback only; torch's store listens on all interfaces (docs/CLUSTERS.md).
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.update(TP_SOCKET_IFNAME=loopback, GLOO_SOCKET_IFNAME=loopback)
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_worker(args.rank, args)  # one rank in this terminal
