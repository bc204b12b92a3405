"""One seed for each stream of random numbers.  (The same file in all four packages.)"""

import hashlib


def seed_for(seed, *parts):
    """Return a 63-bit seed for one stream of random numbers: from --seed and, say, a rank; well mixed, repeatable."""
    text = ",".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
