"""The forty lines of README.md in Monarch: a call, a Future, an object in another process.

pip install torchmonarch torch numpy
python monarch_forty_lines.py
"""

import os
import threading

import torch
from monarch.actor import Actor, endpoint, this_host


def here():
    return f"process {os.getpid()}, thread {threading.get_native_id()}"


class Counter(Actor):  # an actor runs one call at a time
    def __init__(self):
        self.count = 0

    @endpoint
    def add(self, a, b):  # a method, because only endpoints of an actor can be called
        return a + b, here()

    @endpoint
    def increment(self):
        self.count += 1
        return self.count, here()

    @endpoint
    def get_count(self):
        return self.count


if __name__ == "__main__":
    print("The main thread is", here())
    process = this_host().spawn_procs(per_host={"workers": 1})  # "workers" can be any name
    counter = process.spawn("counter", Counter)  # returns before the Counter is made
    total, place = counter.add.call_one(torch.ones(2), 1).get()  # get() waits for the Future
    print("rpc_sync: ", total, "from", place)
    future = counter.add.call_one(torch.ones(2), 2)
    total, place = future.get()
    print("rpc_async:", total, "from", place)
    for _ in range(2):
        count, place = counter.increment.call_one().get()
        print("remote:    the Counter counts", count, "in", place)
    print("to_here:   a copy of its count is", counter.get_count.call_one().get())
    process.stop("done").get()  # ends that process; the end of this program would end it too
