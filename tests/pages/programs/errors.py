"""What the exceptions of failed calls say, over TCP and in shared memory; and what recipe 14 makes of them."""

import json
import os
import signal
import tempfile
import time

import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from recipes_14 import what_happened


def work(task):
    if task == "raises":
        raise KeyError(task)
    if task == "raises a ValueError":
        raise ValueError(task)
    if task == "returns what cannot be pickled":
        return lambda: None
    if task == "takes long":
        time.sleep(3)
    if task == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)


def run(rank, transport, folder):
    options = rpc.TensorPipeRpcBackendOptions(_transports=[transport], init_method=f"file://{folder}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        time.sleep(60)  # until it is killed
    tasks = ["raises", "raises a ValueError", "returns what cannot be pickled", lambda: None, "takes long", "is killed"]
    for task in tasks:
        raised_by = "rpc_async"
        try:
            future = rpc.rpc_async("worker1", work, (task,), timeout=1)
            raised_by = "wait"
            future.wait()
        except Exception as error:
            what = raised_by, type(error).__name__, " ".join(str(error).split()), what_happened(error)
            print(json.dumps(what), flush=True)
    os._exit(0)


if __name__ == "__main__":
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    for transport in "uv", "shm":
        with tempfile.TemporaryDirectory() as folder:
            ranks = [mp.get_context("fork").Process(target=run, args=(rank, transport, folder)) for rank in (0, 1)]
            for rank in ranks:
                rank.start()
            ranks[0].join()
            ranks[1].kill()
