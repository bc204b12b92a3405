"""Which rank has which role, and its name in RPC."""

ROLES = "rank 0 is the server (in sharded, the first --num_servers ranks are servers), every other rank a trainer"


def worker_name(rank, args):
    """Return the RPC name of a rank. Servers and trainers are each numbered from 1."""
    return f"server{rank + 1}" if rank < args.num_servers else f"trainer{rank - args.num_servers + 1}"
