"""A run of all tests takes only a part of each large matrix of cases, drawn from a seed that pytest prints.

    @pytest.mark.draw(3)            # of the cases of this test, three
    @pytest.mark.draw(3, "ends")    # of the cases of all tests that say "ends", three

CASES_SEED=4711 ./run_all.sh test    # the same cases again
ALL_CASES=1 ./run_all.sh test        # all of them
python -m pytest tests/jobs          # all cases of the tests there, because they are named
"""

import os
import random

# In the environment, so that all processes of pytest-xdist, which inherit it, draw the same cases.
SEED = os.environ.setdefault("CASES_SEED", str(random.SystemRandom().randrange(10_000)))


def takes_all(config):
    """Return whether a run takes all cases: if the files or folders of its tests are named, as after a change.

    run_all.sh adds --drawn where it names a folder only to run the tests in three parts.
    """
    named = config.args != config.getini("testpaths") and not config.getoption("drawn")
    return named or os.environ.get("ALL_CASES") == "1"


def left_out(tests):
    """Return the set of tests that this run does not take."""
    groups = {}
    for test in tests:
        mark = test.get_closest_marker("draw")
        if mark and not test.get_closest_marker("cuda"):  # those are few, and skipped where there is no GPU
            number, name = (*mark.args, test.nodeid.partition("[")[0])[:2]
            groups.setdefault((name, number), []).append(test)
    left = set()
    for (name, number), group in groups.items():
        left |= {*group} - {*random.Random(f"{SEED} {name}").sample(group, min(number, len(group)))}
    return left


def drawn(config):
    """Return a line about this for pytest's header."""
    if takes_all(config):
        return "cases: all"
    return f"cases: a part of each matrix, drawn by CASES_SEED={SEED} (ALL_CASES=1 runs all)"
