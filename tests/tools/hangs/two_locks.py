"""circle, 2 ranks: each holds its lock while it calls the other, and the called function needs that lock."""

import os
import threading

import torch.distributed.rpc as rpc

lock = threading.Lock()
balance = 100


def deposit(amount):
    global balance
    with lock:  # here
        balance += amount
    return balance


def others_hold_theirs():
    return lock.locked()


def transfer(to, amount):
    global balance
    with lock:
        balance -= amount
        while not rpc.rpc_sync(to, others_hold_theirs):
            pass
        return rpc.rpc_sync(to, deposit, args=(amount,), timeout=3600)  # here


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"bank{rank}", rank=rank, world_size=2)
    transfer(f"bank{1 - rank}", 10)
    rpc.shutdown()
