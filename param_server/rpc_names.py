"""Who is who: ranks and RPC names; and what each has: cores, and a wire for its tensors.

Runs in every process.  Servers come first: rank 0 to --num_servers - 1; every later rank is a trainer.
"""

import os


def worker_name(rank, args):
    """Return a rank's RPC name, as in the tutorial: parameter_server (parameter_server_1, ...), trainer_1, ..."""
    if rank >= args.num_servers:
        return f"trainer_{rank}"
    return "parameter_server" if rank == 0 else f"parameter_server_{rank}"


def trainers(args):
    """Return the ranks of all trainers."""
    return range(args.num_servers, args.world_size)


def usable_cores():
    """Return how many cores this process may use: OMP_NUM_THREADS of them, if set, else all that it may run on."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


def for_wire(tensor, args):
    """Return `tensor` as it may cross RPC: a CUDA tensor as it is only if both ends have a GPU and --wire is direct.

    The one place where tensors are staged through the CPU (which the tutorial, of torch 1.5, had to do always).
    """
    return tensor if args.device == "cuda" and args.wire == "direct" else tensor.cpu()
