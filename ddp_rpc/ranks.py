"""Which rank has which role, and its name in RPC."""

import torch

from glue import UserError

ROLES = "the ranks are --num_trainers (1 or more), then 1 master, then --num_servers (1 or more)"


def worker_name(rank, args):
    """Return the RPC name of a rank."""
    if rank < args.num_trainers:
        return f"trainer{rank + 1}"
    if rank == args.num_trainers:
        return "master"
    return f"server{rank - args.num_trainers}"


def divide_ranks(world_size, num_trainers, num_servers):
    """Return (number of trainers, number of servers) from the flags; a flag that was not given is None."""
    if world_size is None:
        return num_trainers or 2, num_servers or 1
    if num_trainers is None:
        num_servers = num_servers or 1
        return world_size - 1 - num_servers, num_servers
    if num_servers is None:
        num_servers = world_size - 1 - num_trainers
    return num_trainers, num_servers


def check_trainer_devices(devices):
    """Raise UserError if some of the trainers' devices are CPUs and others are GPUs.

    A CPU and a GPU may compute results that differ in the last digit. Then the replicas of `fc` would differ, too.
    """
    if len({torch.device(device).type for device in devices}) > 1:
        named = ", ".join(f"trainer{number} on {device}" for number, device in enumerate(devices, 1))
        raise UserError(f"trainers on CPUs and on GPUs ({named}): give all of them the same --device, cpu or cuda")
