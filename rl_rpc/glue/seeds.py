"""Random numbers that depend on --seed alone: not on threads, devices, or how often the job was restarted.

Runs in every process.
"""

import hashlib

import torch


def seed_for(seed, *parts):
    """Return a 63-bit seed for one stream of random numbers.

    It is a hash of `seed` (the flag --seed) and `parts` (for example the rank), so it is the same in every run.
    """
    text = ",".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def dropout_mask(shape, p, *key, dtype=torch.float32):
    """Return a dropout mask, on the CPU. Its elements are 0 with probability `p`, otherwise 1 / (1 - p).

    It depends on `key` alone: numbers and strings, such as a seed, a step and a layer. torch's own dropout takes the
    next numbers of a generator that all threads of the process share. So its masks would be different with several RPC
    threads, after a restart, or on a GPU.
    """
    generator = torch.Generator().manual_seed(seed_for(*key))
    return torch.empty(shape, dtype=dtype).bernoulli_(1 - p, generator=generator).div_(1 - p)
