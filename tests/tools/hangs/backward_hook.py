"""circle, 2 ranks: a hook of the backward pass calls a function that needs a lock of the caller of backward."""

import os
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

lock = threading.Lock()
weight = torch.ones(2, requires_grad=True)


def count(norm):
    with lock:  # here
        return norm


def report(gradient):
    rpc.rpc_sync("trainer", count, args=(gradient.norm(),), timeout=3600)  # here


def forward(x):
    y = x * weight
    y.register_hook(report)
    return y


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(("trainer", "server")[rank], rank=rank, world_size=2)
    if rank == 0:
        with lock, dist_autograd.context() as context:
            y = rpc.rpc_sync("server", forward, args=(torch.ones(2),))
            dist_autograd.backward(context, [y.sum()])  # here
    rpc.shutdown()
