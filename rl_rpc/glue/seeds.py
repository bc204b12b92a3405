"""One seed for each stream of random numbers.  (The same file in all four packages.)"""

import hashlib

import torch


def seed_for(seed, *parts):
    """Return a 63-bit seed for one stream of random numbers: from --seed and, say, a rank; well mixed, repeatable."""
    text = ",".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def dropout_mask(shape, p, *key, dtype=torch.float32):
    """Return a mask of dropout, on the CPU: 0 with probability `p`, and otherwise 1 / (1 - p).

    It depends on the `key` alone (numbers and strings: a seed, a step, a layer).  torch's own dropout takes the next
    numbers of a generator that all threads of the process share, so that with several RPC threads, or after a restart,
    the masks would be others; and a GPU would draw others than a CPU.
    """
    generator = torch.Generator().manual_seed(seed_for(*key))
    return torch.empty(shape, dtype=dtype).bernoulli_(1 - p, generator=generator).div_(1 - p)
