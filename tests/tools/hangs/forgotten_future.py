"""end, 3 ranks: the Future that meet has returned. It would be completed by a third caller."""

import os
import threading

import torch
import torch.distributed.rpc as rpc

lock = threading.Lock()
arrived = []


@rpc.functions.async_execution
def meet(expected):
    mine = torch.futures.Future()
    with lock:
        arrived.append(mine)
        everybody = list(arrived) if len(arrived) == expected else []
    for future in everybody:
        future.set_result(None)
    return mine


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank:
        rpc.rpc_sync("worker0", meet, args=(3,), timeout=3600)
    rpc.shutdown()
