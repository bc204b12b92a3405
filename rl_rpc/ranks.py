"""Which rank plays which role: rank 0 is the agent, every other rank an observer."""


def worker_name(rank, args):
    """Return the name by which the other ranks call this rank. No two ranks may have the same name."""
    return "agent" if rank == 0 else f"observer{rank}"
