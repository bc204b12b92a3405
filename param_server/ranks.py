"""Which rank has which role, and its name in RPC."""

SERVER = "server1"  # the RPC name of rank 0


def roles(num_servers):
    """Say which rank has which role."""
    servers = "rank 0 is the server" if num_servers == 1 else f"the first {num_servers} ranks are servers"
    return f"{servers}, every other rank a trainer"


def server_name(rank):
    return f"server{rank + 1}"


def worker_name(rank, args):
    """Return the RPC name of a rank."""
    return server_name(rank) if rank < args.num_servers else f"trainer{rank}"
