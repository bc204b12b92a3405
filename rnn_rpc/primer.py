"""The smallest distributed autograd program: one backward pass and one optimizer step through a ring of workers.

    python rnn_rpc/primer.py --world_size 2

Every worker asks the next one for two random tensors, adds them up, and has their gradients computed and applied where
they live.  Before that, it calls torch.add on its neighbour in RPC's three ways.

Source: the example in the documentation of torch.distributed.rpc (distributed autograd and distributed optimizer).
"""

import glue.before_torch  # noqa: F401  (first, see there)

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import optim
from torch.distributed.optim import DistributedOptimizer

from glue import flags, launch
from glue.seeds import seed_for


def worker_name(rank, args):
    """Return the RPC name of a rank."""
    return f"worker{rank}"


def random_tensor(seed):
    """Return a leaf (3, 3) that lives on the worker where this runs.  Needs no lock: its generator is its own."""
    return torch.rand(3, 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def value_of(rref):
    """Return a copy of what is behind an RRef.  Called on its owner, where local_value() is the tensor itself."""
    return rref.local_value().detach().clone()


def three_ways_to_call(neighbour, say):
    """Run torch.add(2, 3) on another worker; what differs is when the call returns, and what."""
    two, three = torch.tensor(2), torch.tensor(3)
    # Returns when the neighbour has computed, with the result.
    answer = rpc.rpc_sync(neighbour, torch.add, args=(two, three))
    say(f"rpc_sync  -> {answer}")
    # Returns at once, with a Future; wait() returns when the result has arrived here.  Work can be done in between.
    future = rpc.rpc_async(neighbour, torch.add, args=(two, three))
    say(f"rpc_async -> {type(future).__name__}, wait() -> {future.wait()}")
    # Returns at once, with a reference; the result stays at the neighbour until somebody asks with to_here().
    rref = rpc.remote(neighbour, torch.add, args=(two, three))
    say(f"remote    -> RRef owned by {rref.owner_name()}, to_here() -> {rref.to_here()}")


def run_ring(neighbour, seeds, lr, say):
    """Let two tensors of the neighbour, p and q, take one step of SGD there: p becomes p - lr * gradient."""
    # Every iteration has a context of its own, which holds its gradients on every worker that it reaches.  backward
    # leaves nothing in .grad, so there is no zero_grad(), and workers that train at once do not mix their gradients.
    with dist_autograd.context() as context_id:
        rref1, rref2 = (rpc.remote(neighbour, random_tensor, args=(seed,)) for seed in seeds)
        before = [rpc.rpc_sync(neighbour, value_of, args=(rref,)) for rref in (rref1, rref2)]
        # to_here() copies the value, and autograd notes where it came from: backward sends the gradient back there.
        total = rref1.to_here() + 2 * rref2.to_here()
        # The loss is a list of roots, all on the calling worker.  Here: d total.sum() / d rref1 = 1, / d rref2 = 2.
        dist_autograd.backward(context_id, [total.sum()])
        DistributedOptimizer(optim.SGD, [rref1, rref2], lr=lr).step(context_id)
        after = [rpc.rpc_sync(neighbour, value_of, args=(rref,)) for rref in (rref1, rref2)]

    for name, p, p_after, gradient in zip("pq", before, after, (1, 2), strict=True):
        say(f"{name} on {neighbour} before, its first row: {_row(p)}")
        say(f"{name} after one step of SGD, lr {lr:g}:  {_row(p_after)}")
        torch.testing.assert_close(p_after, p - lr * gradient)
        say(f"  = {name} - {lr:g} * gradient, which is {gradient} everywhere")


def _row(tensor):
    return " ".join(f"{value:.4f}" for value in tensor[0].tolist())


def run_worker(rank, args, job):
    """Run in every process: all are equals here."""
    name, neighbour = worker_name(rank, args), worker_name((rank + 1) % args.world_size, args)
    rpc.init_rpc(name, rank=rank, world_size=args.world_size, rpc_backend_options=job.rpc_options())
    lines = []
    three_ways_to_call(neighbour, lines.append)
    run_ring(neighbour, [seed_for(args.seed, rank, i) for i in range(2)], args.lr, lines.append)
    # All ranks write to one terminal: one write each, so that their lines stay together.
    print("".join(f"{name}: {line}\n" for line in lines), end="", flush=True)
    job.wait_for_all()
    rpc.shutdown()


def parse_args(argv=None):
    parser = flags.argument_parser(__doc__, {"ring": run_ring}, world_size=2)
    parser.prog = "rnn_rpc/primer.py"
    parser.add_argument("--lr", type=flags.positive_float, default=0.05, metavar="X", help="learning rate")
    args = parser.parse_args(argv)
    flags.check_arguments(parser, args, min_world_size=2, roles="every rank is a worker in the ring")
    return args


if __name__ == "__main__":
    launch.launch(run_worker, parse_args(), worker_name)
