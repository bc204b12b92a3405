"""Kill a rank in many random jobs, of which test_lifecycle_faults.py has a few, and check what follows.

    python tools/soak_faults.py --cases 100 --seed 1000

run_case, in tests/harness/faults.py, says what must happen when a rank dies.
"""

import argparse
import collections
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "harness"))

from faults import case_id, draw_case, run_case


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1000, help="number of the first case")
    args = parser.parse_args()
    took, broken = collections.defaultdict(list), 0
    for number in range(args.seed, args.seed + args.cases):
        case = draw_case(number)
        started = time.monotonic()
        try:
            seconds = run_case(*case)
        except AssertionError as error:
            broken += 1
            print(f"{number} {case_id(case)}: BROKEN {error}", flush=True)
            continue
        took[case[3]].append(seconds)
        print(
            f"{number} {case_id(case)}: ended in {seconds:.1f} s ({time.monotonic() - started:.0f} s in all)",
            flush=True,
        )
    for moment, seconds in sorted(took.items()):
        longest = max(seconds)
        print(f"{moment}: {len(seconds)} cases, median {statistics.median(seconds):.1f} s, longest {longest:.1f} s")
    print(f"{broken} of {args.cases} cases did not end as promised")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
