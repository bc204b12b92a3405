"""Measure rl_rpc/tutorial_batch.py with and without batching, and draw the times.

    python bench/rl_batch.py --world_size 11 --num_episode 3 --plot rl_rpc/pictures/batch.png

The time is that of the episodes, without the start of the processes.
"""

import argparse
import functools
import os

import torch.multiprocessing as mp

from common import draw_batching, use_package

use_package("rl_rpc")

import tutorial_batch
from jobs import free_port


def measure(args, world_size, batch):
    """Run one job; return the seconds of its episodes."""
    os.environ["MASTER_PORT"] = str(free_port())
    seconds = mp.get_context("spawn").SimpleQueue()
    mp.spawn(tutorial_batch.run_worker, args=(args, world_size, batch, seconds, False), nprocs=world_size)
    return seconds.get()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world_size", type=int, default=5, help="measure 1 to N - 1 observers (5)")
    parser.add_argument("--num_episode", type=int, default=3, help="of each job (3)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (3)")
    parser.add_argument("--gamma", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=543)
    parser.add_argument("--plot", metavar="FILE.png", required=True)
    args = parser.parse_args()
    os.environ.update(MASTER_ADDR="localhost", TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    draw_batching(args, "observers", f"{args.num_episode} episodes", functools.partial(measure, args))


if __name__ == "__main__":
    main()
