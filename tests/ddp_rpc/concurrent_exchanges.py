"""For test_sharding.py: eight threads call exchange() at once, as RPC does.  Prints how far the table is from its sum.

In a process of its own, because a step that is not locked frees memory which another thread still uses.
"""

import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "ddp_rpc"))
import torch

from pipelined_server import PipelinedShard, exchange

THREADS, TIMES, LR = 8, 100, 0.05


def trainer(number):
    for _ in range(TIMES):
        exchange(number, None, torch.arange(30), torch.arange(30))
        exchange(number, torch.ones(30, 5), None, None)


if __name__ == "__main__":
    shard = PipelinedShard(0, 1, 30, 5, sparse=True, seed=3, device="cpu")
    shard.set_learning_rate(LR)
    before = shard.get_rows().clone()
    threads = [threading.Thread(target=trainer, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print((shard.get_rows() - (before - LR * THREADS * TIMES)).abs().max().item())
