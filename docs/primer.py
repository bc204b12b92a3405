"""Three short lessons about calls between processes, each with one idea more than the last:

    three_ways_to_call         run a function in another process
    backward_through_a_call    let a backward pass go through such a call
    run_ring                   step an optimizer whose parameters are in another process

Every worker runs all three with its neighbour, which is the next worker (after the last comes the
first), and prints what it got:

    python docs/primer.py                            # starts two workers on this machine
    python docs/primer.py --world_size 3 --rank 0    # only rank 0; ranks 1 and 2 in other terminals

    worker1: rpc_sync  -> 5
    worker1: rpc_async -> Future, wait() -> 5
    worker1: remote    -> RRef owned by worker0, to_here() -> 5
    worker1: backward  -> gradient of t1, its first row: 1.0000 1.0000 1.0000; t1.grad is None
    worker1: p on worker0 before, its first row: 0.2876 0.6863 0.6020
    worker1: p after one step of SGD, lr 0.05:  0.2376 0.6363 0.5520
    worker1:   = p - 0.05 * gradient, which is 1 everywhere
    ...                                              (and three such lines about q)

The fourth line is the one to understand. worker1 asked worker0 to compute t1 + t2. The backward pass
went through that call and came back. Yet t1.grad is None. The gradient is kept elsewhere, in an
"autograd context", from which an optimizer takes it.

The last two lessons follow torch's docstring of dist_autograd.context, and the design note about
distributed autograd, which also draws how autograd crosses a call:
https://docs.pytorch.org/docs/stable/rpc/distributed_autograd.html
"""

import argparse
import logging
import os
import sys
import threading
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import optim
from torch.distributed.optim import DistributedOptimizer

# RPC sends the name of a function and not its code. The callee, which is the worker that is called,
# finds the functions below because every worker runs this file. It runs them on its RPC threads.
# There are 16 of them by default, so several calls may run at the same time.


def random_tensor(seed):
    """Return a new tensor (3, 3) that needs a gradient. Runs on its owner. Several workers may call
    this at the same time, and it needs no lock, because each call makes a new generator."""
    return torch.rand(3, 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def value_of(rref):
    """Return a copy of the tensor behind an RRef. Runs on its owner, where local_value() is the
    tensor itself."""
    return rref.local_value().detach().clone()


def three_ways_to_call(neighbour, say):
    """Run torch.add(2, 3) in another process in three ways."""
    two = torch.tensor(2)
    three = torch.tensor(3)
    # rpc_sync waits for the result and returns it.
    answer = rpc.rpc_sync(neighbour, torch.add, args=(two, three))
    say(f"rpc_sync  -> {answer}")
    # rpc_async returns a Future immediately. This worker can do other work before it calls wait().
    future = rpc.rpc_async(neighbour, torch.add, args=(two, three))
    say(f"rpc_async -> {type(future).__name__}, wait() -> {future.wait()}")
    # remote returns an RRef immediately. The result stays with the neighbour. to_here() copies it.
    rref = rpc.remote(neighbour, torch.add, args=(two, three))
    say(f"remote    -> RRef owned by {rref.owner_name()}, to_here() -> {rref.to_here()}")


def backward_through_a_call(neighbour, say):
    """Let another worker add two tensors of this worker, and go backward through that call."""
    t1 = torch.rand((3, 3), requires_grad=True)
    t2 = torch.rand((3, 3), requires_grad=True)
    # Inside a context, autograd remembers where a tensor that needs a gradient crosses to another
    # worker, and the backward pass crosses back at the same places.
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync(neighbour, torch.add, args=(t1, t2)).sum()
        dist_autograd.backward(context_id, [loss])  # a list of losses, scalars in this process
        gradients = dist_autograd.get_gradients(context_id)
    # d loss / d t1 is 1 everywhere. backward() has put it into the context, not into t1.grad.
    say(f"backward  -> gradient of t1, its first row: {_row(gradients[t1])}; t1.grad is {t1.grad}")


class SGD(optim.SGD):
    """Empty. DistributedOptimizer would replace optim.SGD itself by a version of its own, which prints
    a warning about TorchScript in each process. It keeps a subclass as it is."""


def run_ring(neighbour, seeds, lr, say):
    """Change two tensors of the neighbour, p and q, by one step of SGD: p becomes
    p - lr * gradient. Neither of them leaves the neighbour's process."""
    # One context for each training step. Every worker that takes part keeps the gradients under
    # context_id, so workers that train at the same time do not mix theirs.
    with dist_autograd.context() as context_id:
        rref1 = rpc.remote(neighbour, random_tensor, args=(seeds[0],))
        rref2 = rpc.remote(neighbour, random_tensor, args=(seeds[1],))
        before = [rpc.rpc_sync(neighbour, value_of, args=(rref,)) for rref in (rref1, rref2)]
        # to_here() returns a copy. backward() sends the gradient of the copy to the owner: 1
        # everywhere for rref1's tensor, and 2 for rref2's.
        total = rref1.to_here() + 2 * rref2.to_here()
        dist_autograd.backward(context_id, [total.sum()])
        # This makes an SGD in each process that owns one of these tensors. In each of these
        # processes, step() sets .grad to this context's gradients, and makes a step.
        dist_optim = DistributedOptimizer(SGD, [rref1, rref2], lr=lr)
        dist_optim.step(context_id)
        after = [rpc.rpc_sync(neighbour, value_of, args=(rref,)) for rref in (rref1, rref2)]

    for name, p, p_after, gradient in zip("pq", before, after, (1, 2), strict=True):
        say(f"{name} on {neighbour} before, its first row: {_row(p)}")
        say(f"{name} after one step of SGD, lr {lr:g}:  {_row(p_after)}")
        torch.testing.assert_close(p_after, p - lr * gradient)
        say(f"  = {name} - {lr:g} * gradient, which is {gradient} everywhere")


def _row(tensor):
    return " ".join(f"{value:.4f}" for value in tensor[0].tolist())


def run_worker(rank, args):
    """Run one worker. All of them do the same, while their RPC threads serve each other's calls."""
    if parent := mp.parent_process():  # a spawned rank ends when its parent ends
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch itself does this
    # Hides a line about Python's GIL.
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    name = f"worker{rank}"
    neighbour = f"worker{(rank + 1) % args.world_size}"
    # Two arguments that are private to torch, to save CPU time. You can leave them out. Why they
    # are here: docs/COSTS.md
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    rpc.init_rpc(name, rank=rank, world_size=args.world_size, rpc_backend_options=options)
    torch.manual_seed(args.seed * args.world_size + rank)
    seeds = torch.randint(2**31, (2,)).tolist()  # for the tensors that the neighbour makes
    lines = []
    three_ways_to_call(neighbour, lines.append)
    backward_through_a_call(neighbour, lines.append)
    run_ring(neighbour, seeds, args.lr, lines.append)
    # All workers print to one terminal. Each prints its lines in one call, so they stay together.
    print("".join(f"{name}: {line}\n" for line in lines), end="", flush=True)
    rpc.shutdown()  # returns when all ranks have called it; until then this worker serves calls


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--world_size", type=int, default=2, help="number of workers (2)")
    parser.add_argument("--rank", type=int, help="start only this rank")
    parser.add_argument("--master_addr", default="localhost", help="host of rank 0 (localhost)")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port on it (29500)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (0.05)")
    args = parser.parse_args()
    if args.world_size < 2:
        parser.error(f"--world_size {args.world_size}: it must be 2 or more")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank {args.rank}: it must be from 0 to {args.world_size - 1}")
    if not 0 < args.lr < float("inf"):
        parser.error(f"--lr {args.lr}: it must be a positive number")
    return args


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # else torch may wait 10 s for DNS
    if args.master_addr in ("localhost", "127.0.0.1"):
        # Anyone who can connect can run code here, so RPC and Gloo listen on loopback only. The store,
        # at --master_port, still listens on all interfaces.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.update(TP_SOCKET_IFNAME=loopback, GLOO_SOCKET_IFNAME=loopback)
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_worker(args.rank, args)  # one rank in this terminal
