"""For test_sharding.py: eight threads call exchange() at the same time, as RPC threads do.

Prints the largest difference between the table and the result that it must have. This runs in a process of its own,
because without the lock an update may free memory that another thread still uses, and the process may crash.
"""

import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "ddp_rpc"))
import torch

from pipelined import EmbeddingShard

THREADS, TIMES, LR = 8, 100, 0.05


def trainer(number):
    for _ in range(TIMES):
        shard.exchange(number, None, torch.arange(30), torch.arange(30))
        shard.exchange(number, torch.ones(30, 5), None, None)


if __name__ == "__main__":
    shard = EmbeddingShard(0, 1, 30, 5, sparse=True, seed=3, device="cpu")
    shard.set_learning_rate(LR)
    before = shard.state_dict()["weight"].clone()
    threads = [threading.Thread(target=trainer, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print((shard.state_dict()["weight"] - (before - LR * THREADS * TIMES)).abs().max().item())
