"""Which rank has which role, and its name in RPC."""

ROLES = "rank 0 is the server, every other rank a trainer"
SERVER = "server1"  # the server's name in RPC


def worker_name(rank, args):
    """Return the RPC name of a rank."""
    return SERVER if rank == 0 else f"trainer{rank}"
