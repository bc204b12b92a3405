"""Which rank plays which role: ranks 0 to --num_servers - 1 are servers, all other ranks are trainers."""


def worker_name(rank, args):
    """Return the name by which the other ranks call this rank. No two ranks may have the same name."""
    return server_name(rank) if rank < args.num_servers else f"trainer{rank - args.num_servers + 1}"


def server_name(rank):
    return f"server{rank + 1}"


def trainers(args):
    """Return the ranks of all trainers."""
    return range(args.num_servers, args.world_size)
