"""The forty lines of README.md in Ray: a call, a Future, an object in another process.

pip install ray torch numpy
python ray_forty_lines.py
"""

import os
import threading

import ray
import torch


def here():
    return f"process {os.getpid()}, thread {threading.get_native_id()}"


@ray.remote
def add(a, b):  # a task: Ray chooses a process for each call
    return a + b, here()


@ray.remote
class Counter:  # an actor: an object in a process of its own. It runs one call at a time
    def __init__(self):
        self.count = 0

    def increment(self):
        self.count += 1
        return self.count, here()

    def get_count(self):
        return self.count


if __name__ == "__main__":
    # This starts Ray's processes on this machine. ray.init(address="auto") joins a running cluster.
    ray.init(include_dashboard=False, logging_level="ERROR")
    print("The main thread is", here())
    total, place = ray.get(add.remote(torch.ones(2), 1))  # remote() does not wait; get() does
    print("rpc_sync: ", total, "from", place)
    future = add.remote(torch.ones(2), 2)
    total, place = ray.get(future)
    print("rpc_async:", total, "from", place)
    counter = Counter.remote()  # returns a handle before the actor's process has started
    for _ in range(2):
        count, place = ray.get(counter.increment.remote())
        print("remote:    the Counter counts", count, "in", place)
    print("to_here:   a copy of its count is", ray.get(counter.get_count.remote()))
    ray.shutdown()  # ends the Counter and Ray's processes, without waiting for calls
