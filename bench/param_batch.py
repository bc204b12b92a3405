"""Measure param_server/tutorial_batch.py with and without batching, and draw the times.

    python bench/param_batch.py --world_size 9 --num_batches 100 --plot param_server/pictures/batch.png

The time is that of the training, without the start of the processes.
"""

import argparse
import functools
import os

import torch.multiprocessing as mp

from common import draw_batching, use_package

use_package("param_server")

import tutorial_batch
from jobs import free_port


def run_rank(rank, args, seconds):
    """Run one rank. `seconds`: a queue that gets the time of the training."""
    took = tutorial_batch.run_worker(rank, args)
    if rank == 0:
        seconds.put(took)


def measure(args, world_size, batch):
    """Run one job; return the seconds of its training."""
    os.environ["MASTER_PORT"] = str(free_port())
    case = argparse.Namespace(**vars(args) | {"world_size": world_size, "no_batch": not batch})
    seconds = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run_rank, args=(case, seconds), nprocs=world_size)
    return seconds.get()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world_size", type=int, default=6, help="measure 1 to N - 1 trainers (6)")
    parser.add_argument("--num_batches", type=int, default=50, help="per trainer (50)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", metavar="FILE.png", required=True)
    args = parser.parse_args()
    os.environ.update(MASTER_ADDR="localhost", TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    work = f"{args.num_batches} batches of each trainer"
    draw_batching(args, "trainers", work, functools.partial(measure, args))


if __name__ == "__main__":
    main()
