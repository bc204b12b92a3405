"""Measure how a job of many ranks starts: rl_rpc from its start to its end, with one episode.

    python bench/start.py                                    # 3, 9, 33, 65 and 129 ranks, some minutes on 2 cores
    python bench/start.py --ranks 3 65 --repeats 5 --against ../other    # beside another checkout, in turn

Memory is what the ranks have for themselves (Pss), added up. Descriptors are those of rank 0, which has the most. Both
are of the moment in which they were largest, and of one further run, because looking takes time.
"""

import contextlib
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

from common import ROOT, argument_parser, write_json

FLAGS = ["--mode", "rollout", "--transport", "uv", "--max_episodes", "1", "--eval_episodes", "0"]


def seconds_of(checkout, ranks):
    started = time.perf_counter()
    job = start(checkout, ranks)
    assert job.wait() == 0
    return time.perf_counter() - started


def start(checkout, ranks):
    words = [sys.executable, f"{checkout}/rl_rpc/main.py", "--world_size", str(ranks), *FLAGS]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL)


def look_at(checkout, ranks):
    """Run the job once more; return its most descriptors and megabytes."""
    job = start(checkout, ranks)
    descriptors = megabytes = 0
    while job.poll() is None:
        with contextlib.suppress(OSError, IndexError):  # a process has just ended
            children = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
            descriptors = max(descriptors, len(os.listdir(f"/proc/{children[0]}/fd")))
            megabytes = max(megabytes, sum(map(own_kilobytes, children)) // 1024)
    return descriptors, megabytes


def own_kilobytes(pid):
    return int(re.search(r"^Pss: +(\d+)", pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)[1])


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 9, 33, 65, 129], metavar="N")
    parser.add_argument("--against", metavar="DIR", help="another checkout, whose seconds are compared with")
    args = parser.parse_args()
    checkouts = [ROOT, *([args.against] if args.against else [])]
    rows = {}
    print(f"{'ranks':>5} {'seconds':>8} {'min - max':>14} {'descriptors':>12} {'megabytes':>10}  ratio to the other")
    for ranks in args.ranks:
        rounds = [[seconds_of(checkout, ranks) for checkout in checkouts] for _ in range(args.repeats)]
        seconds = [runs[0] for runs in rounds]
        ratios = [runs[0] / runs[-1] for runs in rounds] if args.against else []
        span = f"{min(seconds):.1f} - {max(seconds):.1f}"
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})" if ratios else ""
        descriptors, megabytes = look_at(ROOT, ranks)
        print(f"{ranks:5} {statistics.median(seconds):8.1f} {span:>14} {descriptors:12} {megabytes:10}  {ratio}")
        rows[ranks] = {"seconds": rounds, "descriptors": descriptors, "megabytes": megabytes}
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
