"""Which rank has which role, and its name in RPC."""

ROLES = "the first ranks are trainers, 1 or more; then come 1 master and --num_servers servers"


def worker_name(rank, args):
    """Return the RPC name of a rank."""
    if rank < args.num_trainers:
        return f"trainer{rank + 1}"
    if rank == args.num_trainers:
        return "master"
    return f"server{rank - args.num_trainers}"
