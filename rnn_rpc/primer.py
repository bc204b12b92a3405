"""The smallest programs of RPC, one after the other: a call, a backward pass through a call, and an optimizer step.

    python primer.py                            # two workers on this machine; every worker calls the next one
    python primer.py --world_size 3 --rank 0    # or one rank per terminal: this one, then --rank 1 and --rank 2

Sources: two examples in torch's documentation.  `backward_through_a_call` follows that of distributed autograd: two
leaves that live on the caller, added by torch.add on another worker.  `run_ring` follows that of the distributed
optimizer, where it is called `_run_process`.  DIFFERENCES.md says where they depart.
"""

import argparse
import logging
import os
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import optim
from torch.distributed.optim import DistributedOptimizer

# RPC sends functions by name.  Each worker finds those of this file because it runs this same file.


def random_tensor(seed):
    """Return a leaf (3, 3) that lives on the worker where this runs.  Needs no lock: its generator is its own."""
    return torch.rand(3, 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def value_of(rref):
    """Return a copy of what is behind an RRef.  Called on its owner, where local_value() is the tensor itself."""
    return rref.local_value().detach().clone()


def three_ways_to_call(neighbour, say):
    """Run torch.add(2, 3) on another worker; what differs is when the call returns, and what."""
    two = torch.tensor(2)
    three = torch.tensor(3)
    # Returns when the neighbour has computed, with the result.
    answer = rpc.rpc_sync(neighbour, torch.add, args=(two, three))
    say(f"rpc_sync  -> {answer}")
    # Returns at once, with a Future; wait() returns when the result has arrived here.  Work can be done in between.
    future = rpc.rpc_async(neighbour, torch.add, args=(two, three))
    say(f"rpc_async -> {type(future).__name__}, wait() -> {future.wait()}")
    # Returns at once, with a reference; the result stays at the neighbour until a worker asks for it with to_here().
    rref = rpc.remote(neighbour, torch.add, args=(two, three))
    say(f"remote    -> RRef owned by {rref.owner_name()}, to_here() -> {rref.to_here()}")


def backward_through_a_call(neighbour, say):
    """Let another worker add two tensors that live here, and run backward through that call."""
    t1 = torch.rand((3, 3), requires_grad=True)
    t2 = torch.rand((3, 3), requires_grad=True)
    # While a context is open, each call notes which tensors that need a gradient it has sent, and to which worker.
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync(neighbour, torch.add, args=(t1, t2)).sum()
        # The roots are a list, all on the calling worker.
        dist_autograd.backward(context_id, [loss])
        gradients = dist_autograd.get_gradients(context_id)
    # d loss / d t1 is 1 everywhere.  It is in the context, and not in .grad.
    say(f"backward  -> gradient of t1, its first row: {_row(gradients[t1])}; t1.grad is {t1.grad}")


class SGD(optim.SGD):
    """DistributedOptimizer replaces optim.SGD, but not this, by a deprecated class (row 8 of DIFFERENCES.md)."""


def run_ring(neighbour, seeds, lr, say):
    """Let two tensors of the neighbour, p and q, take one step of SGD there: p becomes p - lr * gradient."""
    # Every iteration has a context of its own, which holds its gradients on every worker that it reaches.  backward
    # leaves nothing in .grad, so there is no zero_grad(), and workers that train at once do not mix their gradients.
    with dist_autograd.context() as context_id:
        rref1 = rpc.remote(neighbour, random_tensor, args=(seeds[0],))
        rref2 = rpc.remote(neighbour, random_tensor, args=(seeds[1],))
        before = [rpc.rpc_sync(neighbour, value_of, args=(rref,)) for rref in (rref1, rref2)]
        # to_here() copies the value, and autograd notes where it came from: backward sends the gradient back there.
        total = rref1.to_here() + 2 * rref2.to_here()
        # The loss is a list of roots, all on the calling worker.  Here: d total.sum() / d rref1 = 1, / d rref2 = 2.
        dist_autograd.backward(context_id, [total.sum()])
        # An optimizer on each owner of these tensors, which steps with the gradients of this context.
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
    """Run one rank; all are equals.  Sets the process's number of threads, and turns off two notes of torch."""
    torch.set_num_threads(1)  # the ranks share the cores
    warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own use of Gloo
    # DistributedOptimizer logs that Python's GIL may slow down a class like SGD above.
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    name = f"worker{rank}"
    neighbour = f"worker{(rank + 1) % args.world_size}"
    rpc.init_rpc(name, rank=rank, world_size=args.world_size)
    torch.manual_seed(args.seed * args.world_size + rank)
    seeds = torch.randint(2**31, (2,)).tolist()  # the neighbour makes the tensors, this worker says from which seed
    lines = []
    three_ways_to_call(neighbour, lines.append)
    backward_through_a_call(neighbour, lines.append)
    run_ring(neighbour, seeds, args.lr, lines.append)
    # All ranks write to one terminal: one write each, so that their lines stay together.
    print("".join(f"{name}: {line}\n" for line in lines), end="", flush=True)
    rpc.shutdown()  # returns when all ranks have called it; until then this worker answers calls


def parse_args():
    # Without a usage text, a wrong command line is answered in one line.
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--world_size", type=int, default=2, metavar="N", help="number of workers: 2 or more")
    parser.add_argument("--rank", type=int, metavar="R", help="run only this rank here (default: all)")
    parser.add_argument("--master_addr", default="localhost", metavar="HOST", help="where rank 0 runs")
    parser.add_argument("--master_port", type=int, default=29500, metavar="P", help="a free port there")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of all random numbers")
    parser.add_argument("--lr", type=float, default=0.05, metavar="X", help="learning rate")
    args = parser.parse_args()
    if args.world_size < 2:
        parser.error(f"--world_size {args.world_size}: it must be 2 or more, for every worker calls another")
    if args.rank is not None and not 0 <= args.rank < args.world_size:
        parser.error(f"--rank {args.rank}: it must be from 0 to {args.world_size - 1}")
    if not 0 < args.lr < float("inf"):
        parser.error(f"--lr {args.lr}: it must be a positive number")
    return args


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_worker(args.rank, args)  # one rank in this terminal
