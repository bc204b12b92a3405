"""One tensor for all weights, and one for all gradients: what a push or a pull sends; and a server's range of them.

Runs in every process of mode `replica`.  Eight tensors would be eight messages' worth of overhead per step, and could
not be spread evenly over servers: one of the eight, fc1.weight, is 98 % of the network.

Shapes: P weights in the whole network (1,199,882), R in one server's range.
"""

import torch
from torch import nn, optim

from glue.placement import to_wire
from glue.report import check_finite


def flatten_parameters(net):
    """Make all of `net`'s parameters views of one tensor (P,); return it.  Writing to it changes the network."""
    weights_P = torch.cat([param.detach().reshape(-1) for param in net.parameters()])
    views = named_views(weights_P, net)
    for name, param in net.named_parameters():
        param.data = views[name]
    return weights_P


def flatten_gradients(net):
    """Make all of `net`'s gradients views of one tensor (P,) of zeros; return it.  backward() adds to it.

    Reset it with zero_(), never with zero_grad(), which would replace the views by None.
    """
    gradient_P = torch.cat([torch.zeros_like(param).reshape(-1) for param in net.parameters()]).detach()
    views = named_views(gradient_P, net)
    for name, param in net.named_parameters():
        param.grad = views[name]
    return gradient_P


def named_views(flat_P, net):
    """Return views of `flat_P`, one in the shape of each of `net`'s parameters, by the parameters' names."""
    params = dict(net.named_parameters())
    parts = flat_P.split([param.numel() for param in params.values()])
    return {name: part.view(params[name].shape) for name, part in zip(params, parts, strict=True)}


def range_of(server, num_servers, size):
    """Return the slice of (P,) that a server (from 0) holds: neighbouring ranges, equal up to one weight."""
    return slice(size * server // num_servers, size * (server + 1) // num_servers)


class WeightRange:
    """A server's weights (R,) and their one optimizer.  Not locked: that is RangeServer's part."""

    def __init__(self, part, weights_P, lr, momentum):
        self.part = part  # the slice of (P,)
        self.weights = nn.Parameter(weights_P[part].clone())
        self.optimizer = optim.SGD([self.weights], lr=lr, momentum=momentum)
        self.version = 0  # updates since this process started

    def update(self, pushes):
        """Step once.  Return (trainer, updates that its gradient is late, images, batches) of each push.

        `pushes`: (trainer, version that it has read, gradient (R,), images, batches), of one or of each trainer.
        """
        gradient_R, total = pushes[0][2], sum(images for *_, images, _ in pushes)
        if len(pushes) > 1:  # the mean over all images, as one process on the joined batch has it
            gradient_R = sum(gradient * (images / total) for _, _, gradient, images, _ in pushes)
        check_finite(gradient_R.sum(), f"sum of the gradient of trainer_{pushes[-1][0]}", self.version)
        self.weights.grad = gradient_R
        self.optimizer.step()
        self.weights.grad = None
        self.version += 1
        return [(trainer, self.version - 1 - read, images, batches) for trainer, read, _, images, batches in pushes]

    def answer(self):
        """Return (version, learning rate, weights (R,)).  A copy: RPC reads it when the lock is long free."""
        return self.version, self.optimizer.param_groups[0]["lr"], to_wire(self.weights.detach().clone())

    def capture(self):
        """Return copies of (version, weights (R,), momentum (R,), or (0,) without momentum)."""
        momentum = self.optimizer.state[self.weights].get("momentum_buffer", torch.empty(0))
        return self.version, to_wire(self.weights.detach().clone()), to_wire(momentum.clone())

    def restore(self, weights_P, momentum_P):
        """Take this range of a checkpoint's weights (P,) and momentum (P,), or (0,) without momentum."""
        with torch.no_grad():
            self.weights.copy_(weights_P[self.part])
        if len(momentum_P):
            momentum_R = momentum_P[self.part].to(self.weights.device, copy=True)
            self.optimizer.state[self.weights]["momentum_buffer"] = momentum_R
