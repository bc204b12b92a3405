"""Who is who: ranks and RPC names.

Runs in every process.  Servers come first: rank 0 to --num_servers - 1; every later rank is a trainer.
"""


def worker_name(rank, args):
    """Return a rank's RPC name, as in the tutorial: parameter_server (parameter_server_1, ...), trainer_1, ..."""
    if rank >= args.num_servers:
        return f"trainer_{rank}"
    return "parameter_server" if rank == 0 else f"parameter_server_{rank}"


def trainers(args):
    """Return the ranks of all trainers."""
    return range(args.num_servers, args.world_size)
