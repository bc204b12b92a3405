"""Which rank has which role, and its name in RPC."""

import torch

from glue import UserError

ROLES = "the first ranks are trainers, 1 or more; then come 1 master and --num_servers servers"


def worker_name(rank, args):
    """Return the RPC name of a rank."""
    if rank < args.num_trainers:
        return f"trainer{rank + 1}"
    if rank == args.num_trainers:
        return "master"
    return f"server{rank - args.num_trainers}"


def check_trainer_devices(devices):
    """Raise UserError if some of the trainers' devices are CPUs and others are GPUs.

    A CPU and a GPU may compute results that differ in the last digit. Then the replicas of `fc` would differ, too.
    """
    if len({torch.device(device).type for device in devices}) > 1:
        named = ", ".join(f"trainer{number} on {device}" for number, device in enumerate(devices, 1))
        raise UserError(f"trainers on CPUs and on GPUs ({named}): give all of them the same --device, cpu or cuda")
