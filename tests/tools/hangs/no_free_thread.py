"""circle, 2 ranks: calls back and forth, until no RPC thread is free to run one or to take an answer."""

import os

import torch
import torch.distributed.rpc as rpc


def descend(depth):
    if depth == 0:
        return 1
    other = "right" if rpc.get_worker_info().name == "left" else "left"
    return 1 + rpc.rpc_sync(other, descend, args=(depth - 1,), timeout=3600)  # here


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=3)
    rpc.init_rpc(("left", "right")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        torch.futures.wait_all([rpc.rpc_async("right", descend, args=(9,), timeout=3600) for _ in range(8)])
    rpc.shutdown()
