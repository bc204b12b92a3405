"""circle, 3 ranks: the constructor behind an RRef waits for a lock of the process that waits for the RRef."""

import os
import threading

import torch.distributed.rpc as rpc

lock = threading.Lock()


class Settings:
    def read(self):
        with lock:  # here
            return {}


class Server:
    def __init__(self, settings):
        self.settings = settings.rpc_async(timeout=3600).read().wait()  # here


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank == 0:
        with lock:
            server = rpc.remote("worker2", Server, args=(rpc.RRef(Settings()),), timeout=3600)
            server.to_here(timeout=3600)  # here
    rpc.shutdown()
