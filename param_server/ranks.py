"""Which rank plays which role."""

ROLES = "rank 0 is the server, every other rank a trainer"
SERVER = "server1"  # the server's name in RPC


def worker_name(rank, args):
    """Return the name by which the other ranks call this rank. No two ranks may have the same name."""
    return SERVER if rank == 0 else f"trainer{rank}"
