"""Runs a program in N forked processes: python start_ranks.py PROGRAM N. Each gets its rank as RANK.

Only this process imports torch, so that a program with four ranks starts as fast as one with two.
"""

import os
import runpy
import sys
import tempfile

import torch.multiprocessing as mp

from jobs import free_port


def run(rank, program, world_size, store, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "STORE": store, "MASTER_PORT": str(port)}
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    program, world_size = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (program, world_size, f"{folder}/store", free_port())
        mp.start_processes(run, arguments, world_size, start_method="fork")
