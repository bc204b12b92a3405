"""Which rank has which role, and its name in RPC."""

TRAINER = 1  # the rank; all other ranks are servers
ROLES = "rank 0 is server1, rank 1 the trainer; with 3 ranks, rank 2 is server2, for the decoder"


def worker_name(rank, args):
    """Return the RPC name of a rank: server1, trainer, server2."""
    return "trainer" if rank == TRAINER else f"server{1 + rank // 2}"
