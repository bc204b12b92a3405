"""One tensor for all weights, and one for all gradients: what a push or a pull sends.

Runs in every process of mode `replica`.  Eight tensors would be eight messages' worth of overhead per step, and could
not be spread evenly over servers: one of the eight, fc1.weight, is 98 % of the network.

Shapes: P weights in the whole network (1,199,882).
"""

import torch


def flatten_parameters(net):
    """Make all of `net`'s parameters views of one tensor (P,); return it.  Writing to it changes the network."""
    params = list(net.parameters())
    weights_P = torch.cat([param.detach().reshape(-1) for param in params])
    for param, view in zip(params, _views(weights_P, params), strict=True):
        param.data = view
    return weights_P


def flatten_gradients(net):
    """Make all of `net`'s gradients views of one tensor (P,) of zeros; return it.  backward() adds to it.

    Reset it with zero_(), never with zero_grad(), which would replace the views by None.
    """
    params = list(net.parameters())
    gradient_P = torch.zeros(sum(param.numel() for param in params), device=params[0].device)
    for param, view in zip(params, _views(gradient_P, params), strict=True):
        param.grad = view
    return gradient_P


def range_of(server, num_servers, size):
    """Return the slice of (P,) that a server (from 0) holds: neighbouring ranges, equal up to one weight.

    As in the paper, where each server is responsible for a range of keys.
    """
    return slice(size * server // num_servers, size * (server + 1) // num_servers)


def _views(flat_P, params):
    parts = flat_P.split([param.numel() for param in params])
    return [part.view(param.shape) for part, param in zip(parts, params, strict=True)]
