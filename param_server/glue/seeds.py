"""Random numbers that depend on --seed alone: not on threads, devices, or how often the job was restarted."""

import hashlib


def seed_for(seed, *parts):
    """Return a 63-bit seed for one stream of random numbers.

    It is a hash of `seed` (the flag --seed) and `parts` (for example the rank), so it is the same in every run.
    """
    text = ",".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
