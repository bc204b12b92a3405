"""Measure the environment steps per second of rl_rpc's modes over a network link with delay.

    sudo python bench/slow_link.py --delay_ms 5

The agent runs on one host, and two observers run on another. Both hosts are network namespaces of this machine, which
tests/harness/two_hosts.py makes. All modes play the same episodes.
"""

import functools
import subprocess
import sys

from common import ROOT, argument_parser, compare, run_main, use_package, write_json

use_package("rl_rpc")

from two_hosts import ADDRESSES, TwoHosts, why_not

MODES = ("step", "packed", "batched", "rollout")


def run(hosts, mode, seed):
    """Run one job across the two hosts; return the agent's summary."""
    job = ["--world_size", 3, "--master_addr", ADDRESSES[0], "--mode", mode]
    job += ["--max_episodes", 30, "--eval_episodes", 0, "--seed", seed]
    observer = [sys.executable, ROOT / "rl_rpc" / "main.py", *job, "--rank"]
    observers = [hosts.on(1, [str(word) for word in (*observer, rank)]) for rank in (1, 2)]
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in observers]
    summary = run_main("rl_rpc", *job, "--rank", 0, by=hosts.on(0, []), timeout=300)
    assert [process.wait(60) for process in started] == [0, 0]
    return summary


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--delay_ms", type=float, default=0, help="of the link, one way (0)")
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    with TwoHosts(delay_ms=args.delay_ms) as hosts:
        variants = {mode: functools.partial(run, hosts, mode, args.seed) for mode in MODES}
        title = f"environment steps per second, {args.delay_ms:g} ms each way"
        write_json(args.json, compare(variants, args, "env_steps_per_second", "step", title))


if __name__ == "__main__":
    main()
