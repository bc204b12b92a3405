"""Three short lessons: ways to call another process, a backward pass through a call, and an optimizer step.

    python primer.py                            # starts two workers on this machine
    python primer.py --world_size 3 --rank 0    # starts only rank 0; start ranks 1 and 2 in other terminals

Every worker runs the three lessons with its neighbour, which is the next worker (for the last worker, the first).

Sources: two examples in torch's documentation.  `backward_through_a_call` follows the example of distributed autograd,
in which another worker adds two tensors of the caller.  `run_ring` follows the example of the distributed optimizer,
in which it is called `_run_process`.  Point 20 of rnn_rpc/DIFFERENCES.md lists the differences.
"""

import argparse
import logging
import os
import sys
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import optim
from torch.distributed.optim import DistributedOptimizer

# RPC sends a function as its name.  A worker can call the functions below on another worker because both run this file.


def random_tensor(seed):
    """Return a new tensor (3, 3) that needs a gradient.  Runs on its owner.

    Several workers may call it at the same time without a lock, because each call has a generator of its own.
    """
    return torch.rand(3, 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def value_of(rref):
    """Return a copy of the tensor that an RRef refers to.  Runs on its owner, so local_value() is the tensor itself."""
    return rref.local_value().detach().clone()


def three_ways_to_call(neighbour, say):
    """Run torch.add(2, 3) on another worker in three ways, which differ in when the call returns, and in its result."""
    two = torch.tensor(2)
    three = torch.tensor(3)
    # rpc_sync waits for the result, and returns it.
    answer = rpc.rpc_sync(neighbour, torch.add, args=(two, three))
    say(f"rpc_sync  -> {answer}")
    # rpc_async returns a Future at once.  wait() waits for the result.  In between, this worker can do other work.
    future = rpc.rpc_async(neighbour, torch.add, args=(two, three))
    say(f"rpc_async -> {type(future).__name__}, wait() -> {future.wait()}")
    # remote returns an RRef at once.  The result stays in the neighbour's process.  to_here() returns a copy of it.
    rref = rpc.remote(neighbour, torch.add, args=(two, three))
    say(f"remote    -> RRef owned by {rref.owner_name()}, to_here() -> {rref.to_here()}")


def backward_through_a_call(neighbour, say):
    """Let another worker add two tensors of this worker, and run a backward pass through that call."""
    t1 = torch.rand((3, 3), requires_grad=True)
    t2 = torch.rand((3, 3), requires_grad=True)
    # Inside a context, autograd records the tensors that need a gradient and cross to another worker.
    # The backward pass follows these records from worker to worker.
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync(neighbour, torch.add, args=(t1, t2)).sum()
        # backward() takes a list of scalars of the calling worker.  The backward pass starts from them.
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
    # d loss / d t1 is 1 everywhere.  This gradient is in the context, and not in t1.grad.
    say(f"backward  -> gradient of t1, its first row: {_row(gradients[t1])}; t1.grad is {t1.grad}")


class SGD(optim.SGD):
    """DistributedOptimizer replaces optim.SGD, but not this class, by another one (rnn_rpc/DIFFERENCES.md)."""


def run_ring(neighbour, seeds, lr, say):
    """Update two tensors of the neighbour, p and q, in its process by one step of SGD: p becomes p - lr * gradient."""
    # Each training step has a context of its own.  The context has gradients on every worker that takes part.
    # backward() does not write to .grad.  So there is no zero_grad(), and workers that train at the same time do not
    # mix their gradients.
    with dist_autograd.context() as context_id:
        rref1 = rpc.remote(neighbour, random_tensor, args=(seeds[0],))
        rref2 = rpc.remote(neighbour, random_tensor, args=(seeds[1],))
        before = [rpc.rpc_sync(neighbour, value_of, args=(rref,)) for rref in (rref1, rref2)]
        # to_here() returns a copy.  Autograd records its owner, and backward() sends the gradient back to the owner.
        total = rref1.to_here() + 2 * rref2.to_here()
        # The gradient of total.sum() is 1 for each element of rref1's tensor, and 2 for each element of rref2's.
        dist_autograd.backward(context_id, [total.sum()])
        # This makes an optimizer on each owner of these tensors.  It steps with the gradients of this context.
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
    """Run one rank.  All ranks do the same.  Sets this process's number of threads, and hides two messages of torch."""
    torch.set_num_threads(1)  # the ranks share the cores
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch causes this warning in init_rpc
    # DistributedOptimizer logs that Python's GIL may slow down an optimizer such as SGD above.
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    name = f"worker{rank}"
    neighbour = f"worker{(rank + 1) % args.world_size}"
    # torch's default transport, shared memory, keeps a core busy for every worker, so all of them are slow if cores are
    # few.  TCP ("uv") does not.  _transports is private to torch (point 22 of rnn_rpc/DIFFERENCES.md).
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    rpc.init_rpc(name, rank=rank, world_size=args.world_size, rpc_backend_options=options)
    torch.manual_seed(args.seed * args.world_size + rank)
    seeds = torch.randint(2**31, (2,)).tolist()  # of the tensors that the neighbour makes for this worker
    lines = []
    three_ways_to_call(neighbour, lines.append)
    backward_through_a_call(neighbour, lines.append)
    run_ring(neighbour, seeds, args.lr, lines.append)
    # All ranks print to one terminal.  Each prints all its lines at once, so that they stay together.
    print("".join(f"{name}: {line}\n" for line in lines), end="", flush=True)
    rpc.shutdown()  # returns when all ranks have called it; until then this worker serves calls


def parse_args():
    # Without the usage text, the error message for a wrong command line is one line.
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--world_size", type=int, default=2, metavar="N", help="number of workers, 2 or more")
    parser.add_argument("--rank", type=int, metavar="R", help="run only this rank (default: all ranks)")
    parser.add_argument("--master_addr", default="localhost", metavar="HOST", help="the host of rank 0")
    parser.add_argument("--master_port", type=int, default=29500, metavar="P", help="a free port of that host")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of all random numbers")
    parser.add_argument("--lr", type=float, default=0.05, metavar="X", help="learning rate")
    args = parser.parse_args()
    if args.world_size < 2:
        parser.error(f"--world_size {args.world_size}: it must be 2 or more, because each worker calls another one")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank {args.rank}: it must be from 0 to {args.world_size - 1}")
    if not 0 < args.lr < float("inf"):
        parser.error(f"--lr {args.lr}: it must be a positive number")
    return args


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    if args.master_addr in ("localhost", "127.0.0.1"):
        # Anyone who can connect to a worker can run code in it.  So RPC listens on the loopback interface only.  The
        # store, at --master_port, still listens on all interfaces (point 21 of rnn_rpc/DIFFERENCES.md).
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # init_rpc uses Gloo for a moment
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_worker(args.rank, args)  # one rank in this terminal
