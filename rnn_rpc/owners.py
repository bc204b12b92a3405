"""Functions and methods that the trainer calls on each owner of parameters: for gradients, optimizers and checkpoints.

Runs in every process: the servers own the embedding table and the decoder, and the trainer owns the LSTM.  The methods
of RemoteLayer run on the servers.  The functions after it run on every owner, the trainer included.
"""

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn, optim
from torch.distributed.rpc import RRef

# The device of this process's layers.  main.py sets it in each process.  The trainer, which creates the layers by RPC,
# sends no device, because the GPUs of a host, and this rank's GPU among them, are found on that host.
device = torch.device("cpu")


def set_device(own_device):
    """Set the device of the layers that are created in this process after this call."""
    global device
    device = own_device


def get_device():
    """Return the device of this process's layers."""
    return device


class RemoteLayer(nn.Module):
    """The methods that the embedding table and the decoder both need because their caller is another process.

    Thread-safety: no method takes a lock.  There is one trainer.  While it steps the optimizers, switches between
    training and evaluation, or loads a state, no forward or backward pass is running.  Several forward and backward
    passes may run at the same time, because they only read the parameters.
    """

    def __init__(self):
        super().__init__()
        self.device = get_device()

    def parameter_rrefs(self):
        """Return an RRef to each parameter, for DistributedOptimizer.  The parameters themselves are not sent."""
        return [RRef(parameter) for parameter in self.parameters()]

    def set_training(self, training):
        """Switch dropout and autograd on or off in this process, where the trainer's train() and eval() have no effect.

        The trainer does not call train() by RPC, because train() returns the module, and RPC would send a copy of it
        back.
        """
        self.train(training)

    def state(self):
        """Return the parameters for a checkpoint: name -> CPU tensor."""
        return {name: value.cpu() for name, value in self.state_dict().items()}

    def load_state(self, state):
        """Copy parameters from a checkpoint into this layer's tensors (the optimizer refers to the same tensors)."""
        self.load_state_dict(state)


# The functions below are no methods of a layer.  They use objects of torch: the gradients of an autograd context, and
# the optimizers that DistributedOptimizer makes.  They need no lock, because the trainer waits for each of them before
# its next call to the same owner.

# The gradients of a training step are in its autograd context, in the process that owns the parameter.
# get_gradients() returns the tensors themselves, not copies.


def gradient_norm(context_id):
    """Return the L2 norm of all gradients that this process holds in the context."""
    return torch.nn.utils.get_total_norm(list(dist_autograd.get_gradients(context_id).values())).item()


def scale_gradients(context_id, factor):
    """Multiply in place all gradients that this process holds in the context; opt.step(context_id) uses the result."""
    for gradient in dist_autograd.get_gradients(context_id).values():
        gradient.mul_(factor)


class SGD(optim.SGD):
    """DistributedOptimizer replaces optim.SGD, but not this class, by a deprecated one (point 8 of DIFFERENCES.md)."""


class Adam(optim.Adam):
    """DistributedOptimizer replaces optim.Adam in the same way, but not this class."""


OPTIMIZERS = {"sgd": SGD, "adam": Adam}


def _optimizer_of(optimizer_rref):
    """Return the torch.optim optimizer of this process.

    DistributedOptimizer has only one method, step().  It has an RRef to an object of torch on each owner, and the
    attribute `optim` of that object is the optimizer.
    """
    return optimizer_rref.local_value().optim


def set_learning_rate(optimizer_rref, lr):
    """Set the learning rate of this process's optimizer."""
    for group in _optimizer_of(optimizer_rref).param_groups:
        group["lr"] = lr


def optimizer_state(optimizer_rref):
    """Return the state_dict of this process's optimizer, with its tensors on the CPU."""
    packed = _optimizer_of(optimizer_rref).state_dict()
    on_cpu = {}
    for index, values in packed["state"].items():
        on_cpu[index] = {name: value.cpu() if torch.is_tensor(value) else value for name, value in values.items()}
    packed["state"] = on_cpu
    return packed


def load_optimizer_state(optimizer_rref, state):
    """Load a state_dict from a checkpoint (torch.optim moves its tensors to the device of each parameter)."""
    _optimizer_of(optimizer_rref).load_state_dict(state)
