"""The optimizer that DistributedOptimizer makes in each process, and functions that change learning rates.

Runs in trainers and servers.
"""

import torch.distributed.rpc as rpc
from torch import optim


class SGD(optim.SGD):
    """DistributedOptimizer replaces optim.SGD by a deprecated class, but not a subclass (DIFFERENCES.md, number 20)."""


def set_learning_rate(optimizer, lr):
    """Set the learning rate of an optimizer of torch.optim in this process."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def set_distributed_learning_rate(distributed_optimizer, lr):
    """Set the learning rate of all optimizers that a DistributedOptimizer has made, in all processes.

    A DistributedOptimizer has no param_groups.  Its attribute `remote_optimizers`, and the attribute `optim` that
    set_learning_rate_here uses, are not in torch's documentation.
    """
    for optimizer_rref in distributed_optimizer.remote_optimizers:
        rpc.rpc_sync(optimizer_rref.owner(), set_learning_rate_here, args=(optimizer_rref, lr))


def set_learning_rate_here(optimizer_rref, lr):
    """Set the learning rate of one of these optimizers, in the process that owns it.

    Trainers call this function over RPC.  It is not a method that is called through the RRef, because the object of the
    RRef has a class of torch, without such a method.
    Needs no lock: a trainer calls this between two of its training steps, and no other trainer uses this optimizer.
    """
    set_learning_rate(optimizer_rref.local_value().optim, lr)
