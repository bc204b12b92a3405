"""A run of the tests takes only a part of each large matrix of cases, drawn from a seed that pytest prints.

CASES_SEED=4711 python -m pytest tests/jobs    # the same cases again
ALL_CASES=1 python -m pytest tests/jobs        # all of them
"""

import os
import random

# In the environment, so that all processes of pytest-xdist, which inherit it, draw the same cases.
SEED = os.environ.setdefault("CASES_SEED", str(random.SystemRandom().randrange(10_000)))


def some_of(cases, number):
    """Return `number` of these cases for parametrize, in their order; all of them with ALL_CASES=1."""
    cases = list(cases)
    if os.environ.get("ALL_CASES") == "1":
        return cases
    chosen = random.Random(f"{SEED} of {len(cases)}").sample(range(len(cases)), number)
    return [cases[place] for place in sorted(chosen)]


def drawn():
    """Return a line about this for pytest's header."""
    if os.environ.get("ALL_CASES") == "1":
        return "cases: all"
    return f"cases: a part of each matrix, drawn by CASES_SEED={SEED} (ALL_CASES=1 runs all)"
