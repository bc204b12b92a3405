"""docs/CONCEPTS.md says where shutdown stands. Here rank 0 fails at these lines: where_shutdown.py start|raise|exit."""

import multiprocessing
import os
import sys
import time

import torch.distributed.rpc as rpc

from pages import Page

(LINES,) = Page("docs/CONCEPTS.md").blocks("python", "rpc.init_rpc")
what, world_size = sys.argv[1], 2


def run(rank):
    def work():
        if rank == 1:
            time.sleep(60)  # until it is killed
        rpc.rpc_async("worker1", time.sleep, args=(60,))
        if what == "raise":
            raise ValueError("a mistake")
        sys.exit(3)

    name = "observer" if what == "start" else f"worker{rank}"
    exec(LINES, globals() | locals())


if __name__ == "__main__":
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    multiprocessing.get_context("fork").Process(target=run, args=(1,), daemon=True).start()
    run(0)
