"""Recipe 9, where each stage waits until the other has begun with the next or the previous micro-batch.

It does so instead of sleeping. If the stages did not work at the same time, a wait would fail.
"""

import datetime
import itertools
import os
import runpy
import time

import torch.distributed as dist
import torch.distributed.rpc as rpc

calls = itertools.count(1)


def meet(seconds):
    if seconds != 0.05 * 2:  # it is a whole batch
        return
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    me, call = rpc.get_worker_info().name, next(calls)
    store.set(f"{me}, call {call}", "has begun")
    if me == "worker1" and call > 1:
        store.wait([f"worker2, call {call - 1}"], datetime.timedelta(seconds=20))
    if me == "worker2" and call < 4:
        store.wait([f"worker1, call {call + 1}"], datetime.timedelta(seconds=20))


time.sleep = meet
runpy.run_path("recipes_9.py", run_name="__main__")
