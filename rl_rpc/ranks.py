"""Which rank has which role, and its name in RPC."""

ROLES = "rank 0 is the agent, every other rank an observer"


def worker_name(rank, args):
    """Return the RPC name of a rank."""
    return "agent" if rank == 0 else f"observer{rank}"
