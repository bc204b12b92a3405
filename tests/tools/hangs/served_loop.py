"""end, 3 ranks: it sleeps. A served function waits in a loop for something that never comes."""

import os
import time

import torch.distributed.rpc as rpc

finished = []


def wait_for(number):
    while len(finished) < number:
        time.sleep(0.05)  # here
    return finished[number - 1]


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank:
        rpc.rpc_sync("worker0", wait_for, args=(1,), timeout=3600)
    rpc.shutdown()
