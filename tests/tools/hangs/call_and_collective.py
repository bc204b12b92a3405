"""circle, 2 ranks: a called function waits for what follows a collective, which its caller has not begun."""

import os
import threading

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

averaged = threading.Event()


def parameters():
    averaged.wait()  # here
    return torch.zeros(2)


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
    rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=2)
    gradient = torch.ones(2)
    if rank == 0:
        gradient += rpc.rpc_sync("trainer1", parameters, timeout=3600)  # here
        dist.all_reduce(gradient)
    else:
        dist.all_reduce(gradient)  # here
        averaged.set()
    rpc.shutdown()
