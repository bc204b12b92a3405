"""What the trainer asks of each process that owns parameters, besides forward passes.

Runs in every process: the servers own the embedding table and the decoder, and the trainer owns the LSTM.  The
trainer calls the methods of RemoteLayer, and the functions below it, on the owners.
"""

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn, optim
from torch.distributed.rpc import RRef

# Where this process keeps its layers.  Its own main.py says so.  The trainer, which has the layers made here, does not
# send a device: only this process knows which GPUs its host has, and which of them is its own.
device = torch.device("cpu")


def set_device(own_device):
    """Say where the layers that are made in this process from now on are."""
    global device
    device = own_device


def get_device():
    """Return where this process keeps its layers."""
    return device


class RemoteLayer(nn.Module):
    """What both layers need because their caller is another process.

    Thread-safety: nothing here takes a lock.  There is one trainer, and it never has a forward or backward pass under
    way while it steps the optimizer, changes the mode, or loads a state; passes among themselves only read.
    """

    def __init__(self):
        super().__init__()
        self.device = get_device()

    def parameter_rrefs(self):
        """Return one RRef per parameter, for DistributedOptimizer.  The RRefs travel, the parameters stay."""
        return [RRef(parameter) for parameter in self.parameters()]

    def set_training(self, training):
        """Switch dropout and gradients on or off in this process: the trainer's own train() and eval() do not reach it.

        Not simply train(): that returns the module, and RPC would send a copy of it back.
        """
        self.train(training)

    def state(self):
        """Return the parameters for a checkpoint: name -> CPU tensor."""
        return {name: value.cpu() for name, value in self.state_dict().items()}

    def load_state(self, state):
        """Put checkpointed parameters in place (into the same tensors: the optimizer knows them by identity)."""
        self.load_state_dict(state)


# What follows are functions, which RPC sends by name, and not methods: gradients, and the optimizers that
# DistributedOptimizer makes, are in objects of torch.  No lock: the trainer asks one thing at a time.

# The gradients of a training step live in its autograd context, on the process that owns the parameter.  get_gradients
# gives the tensors themselves, not copies.


def gradient_norm(context_id):
    """Return the L2 norm of all gradients that this process holds in the context."""
    return torch.nn.utils.get_total_norm(list(dist_autograd.get_gradients(context_id).values())).item()


def scale_gradients(context_id, factor):
    """Multiply all gradients that this process holds in the context, in place: opt.step(context_id) reads the same."""
    for gradient in dist_autograd.get_gradients(context_id).values():
        gradient.mul_(factor)


class SGD(optim.SGD):
    """DistributedOptimizer would replace optim.SGD, but not this, by a deprecated class (row 8 of DIFFERENCES.md)."""


class Adam(optim.Adam):
    """DistributedOptimizer would replace optim.Adam, as it would optim.SGD."""


OPTIMIZERS = {"sgd": SGD, "adam": Adam}


def _optimizer_of(optimizer_rref):
    """Return this owner's torch.optim optimizer.

    DistributedOptimizer can only step.  It has an RRef to an object on each owner, which has the optimizer inside.
    """
    return optimizer_rref.local_value().optim


def set_learning_rate(optimizer_rref, lr):
    """Change the learning rate of the optimizer on this owner."""
    for group in _optimizer_of(optimizer_rref).param_groups:
        group["lr"] = lr


def optimizer_state(optimizer_rref):
    """Return the state_dict of the optimizer on this owner, its tensors on the CPU."""
    packed = _optimizer_of(optimizer_rref).state_dict()
    on_cpu = {}
    for index, values in packed["state"].items():
        on_cpu[index] = {name: value.cpu() if torch.is_tensor(value) else value for name, value in values.items()}
    packed["state"] = on_cpu
    return packed


def load_optimizer_state(optimizer_rref, state):
    """Put a checkpointed state_dict in place (torch.optim moves the tensors to each parameter's device)."""
    _optimizer_of(optimizer_rref).load_state_dict(state)
