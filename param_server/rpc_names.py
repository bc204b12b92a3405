"""The ranks' roles and RPC names: ranks 0 to --num_servers - 1 are servers, all other ranks are trainers.

Runs in every process.
"""


def worker_name(rank, args):
    """Return a rank's RPC name, as in the tutorial: parameter_server (parameter_server_1, ...), trainer_1, ..."""
    return server_name(rank) if rank < args.num_servers else f"trainer_{rank}"


def server_name(index):
    """Return the RPC name of a server (from 0)."""
    return "parameter_server" if index == 0 else f"parameter_server_{index}"


def trainers(args):
    """Return the ranks of all trainers."""
    return range(args.num_servers, args.world_size)
