"""Seeds of random numbers, and noticing that training has diverged."""

import hashlib
import math

from glue import UserError

import torch


def seed_for(seed, *parts):
    """Return a 63-bit seed for one stream of random numbers. It depends on its arguments alone.

    It is a hash of `seed` (the flag --seed) and `parts` (for example the rank), and so the same on any thread and
    device, and however often the job was restarted.
    """
    text = ",".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def check_finite(value, what, step, at_most=math.inf):
    """Return `value`, a number or a tensor with one element, as a number.

    Raises UserError if it shows that training has diverged. `what`: its name for the user; `at_most`: the largest value
    of a training that has not diverged.
    """
    value = value.item() if isinstance(value, torch.Tensor) else value
    if not math.isfinite(value) or abs(value) > at_most:
        raise UserError(f"step {step}: the {what} is {value:g}: training has diverged, try a lower --lr")
    return value
