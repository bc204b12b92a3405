"""Measure the environment steps per second of rl_rpc's modes over a network link with delay.

    sudo python bench/slow_link.py

The agent runs on one host, and two observers run on another. Both hosts are network namespaces of this machine, which
tests/harness/two_hosts.py makes. All modes play the same number of episodes. All modes but async play the same
episodes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from common import ROOT, use_package

use_package("rl_rpc")

from two_hosts import ADDRESSES, TwoHosts, why_not

MODES = ("step", "packed", "batched", "rollout", "async")


def steps_per_second(hosts, mode, episodes):
    """Run one job across the two hosts; return its environment steps per second."""
    episodes *= 2 if mode == "async" else 1  # async counts each observer's episodes
    with tempfile.TemporaryDirectory() as folder:
        summary = os.path.join(folder, "summary.json")
        ranks = []
        for rank in range(3):
            command = [sys.executable, str(ROOT / "rl_rpc" / "main.py"), "--world_size", "3", "--rank", str(rank)]
            command += ["--master_addr", ADDRESSES[0], "--mode", mode, "--max_episodes", str(episodes)]
            command += ["--eval_episodes", "0", "--summary_json", summary]
            ranks.append(subprocess.Popen(hosts.on(min(rank, 1), command), stdout=subprocess.DEVNULL))
        assert [process.wait(300) for process in ranks] == [0, 0, 0]
        with open(summary) as file:
            return json.load(file)["env_steps_per_second"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    delays_help = "delays of the link, one way"
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 1, 5], metavar="MS", help=delays_help)
    parser.add_argument("--episodes", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    print("environment steps per second, median (min - max)")
    print(f"{'delay, one way':>14} " + " ".join(f"{mode:>22}" for mode in args.modes))
    for delay in args.delays:
        runs = {mode: [] for mode in args.modes}
        with TwoHosts(delay_ms=delay) as hosts:
            for _ in range(args.repeats):
                for mode in args.modes:
                    runs[mode].append(steps_per_second(hosts, mode, args.episodes))
        cells = [f"{statistics.median(r):,.0f} ({min(r):,.0f} - {max(r):,.0f})" for r in runs.values()]
        print(f"{delay:11g} ms " + " ".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
