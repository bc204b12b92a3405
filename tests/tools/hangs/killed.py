"""end, 3 ranks: was killed by SIGKILL. The others wait for it in shutdown."""

import os
import signal
import time

import torch.distributed.rpc as rpc


def is_there():
    return True


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    if rank == 2 and (child := os.fork()):  # the starting process does not notice that this rank's worker dies
        os.waitpid(child, 0)
        time.sleep(3600)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank == 2:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    assert rpc.rpc_sync("worker2", is_there)
    rpc.shutdown()
