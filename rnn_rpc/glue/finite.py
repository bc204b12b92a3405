"""Notice that training has diverged."""

import math

from glue import UserError

import torch


def check_finite(value, what, step, at_most=math.inf):
    """Return `value` as a number; raise UserError if it shows that training has diverged.

    `value` is a number or a tensor with one element; `what`: its name for the user; `at_most`: the largest value of a
    training that has not diverged.
    """
    value = value.item() if isinstance(value, torch.Tensor) else value
    if not math.isfinite(value) or abs(value) > at_most:
        raise UserError(f"step {step}: the {what} is {value:g}: training has diverged, try a lower --lr")
    return value
