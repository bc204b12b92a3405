"""The optimizer of every parameter, and how its learning rate changes (runs in trainers and servers)."""

import torch.distributed.rpc as rpc
from torch import optim


class SGD(optim.SGD):
    """DistributedOptimizer replaces optim.SGD, but not this, by a deprecated class (row 20 of DIFFERENCES.md)."""


def set_learning_rate(optimizer, lr):
    """Set the learning rate of one of torch.optim's optimizers, which is in this process."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def set_distributed_learning_rate(distributed_optimizer, lr):
    """Set the learning rate of all the optimizers that a DistributedOptimizer has made, in all processes.

    It has no param_groups.  The RRefs to its optimizers, and their `optim` below, are not in torch's documentation.
    """
    for optimizer_rref in distributed_optimizer.remote_optimizers:
        rpc.rpc_sync(optimizer_rref.owner(), set_learning_rate_here, args=(optimizer_rref, lr))


def set_learning_rate_here(optimizer_rref, lr):
    """Set it in the process that owns the parameters.

    A function, and not a method that is called through the RRef: the object behind the RRef is torch's, which has none.
    Needs no lock: a trainer calls this between two of its own steps, and no other trainer uses the same optimizer.
    """
    set_learning_rate(optimizer_rref.local_value().optim, lr)
