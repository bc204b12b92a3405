"""Assert what docs/MIGRATING.md states about Ray. test_migrating.py runs this in a Python that has Ray."""

import asyncio
import os
import signal
import time

import numpy as np
import ray
import torch


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.count = 0

    def increment(self):
        self.count += 1
        return self.count

    def fail(self):
        raise KeyError("no such key")

    def identity(self, value):
        return value

    def sleep(self, seconds):
        time.sleep(seconds)

    def pid(self):
        return os.getpid()

    def call_back_through(self, other, me):
        return ray.get(other.increment_of.remote(me))

    def increment_of(self, other):
        return ray.get(other.increment.remote())


@ray.remote(num_cpus=0)
class AsyncCounter:
    def __init__(self):
        self.waiting = 0
        self.all_have_arrived = asyncio.Event()

    async def increment(self):
        return 1

    async def call_back_through(self, other, me):
        return await other.increment_of.remote(me)

    async def meet(self, number):
        self.waiting += 1
        if self.waiting == number:
            self.all_have_arrived.set()
        await self.all_have_arrived.wait()
        return self.waiting


def raised_by(ref, timeout=30):
    try:
        ray.get(ref, timeout=timeout)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def wait_until_gone(pid):
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, f"process {pid} has not ended"
        time.sleep(0.05)


def check_calls():
    counter = Counter.options(name="ps").remote()
    assert ray.get([counter.increment.remote() for _ in range(3)]) == [1, 2, 3]  # one at a time, in order
    assert ray.get(ray.get_actor("ps").increment.remote()) == 4
    error = raised_by(counter.fail.remote())
    assert isinstance(error, KeyError) and isinstance(error, ray.exceptions.RayTaskError)
    assert isinstance(raised_by(counter.sleep.remote(1), timeout=0.1), TimeoutError)
    assert ray.get(AsyncCounter.remote().meet.remote(1)) == 1
    gate = AsyncCounter.remote()
    assert ray.get([gate.meet.remote(5) for _ in range(5)]) == [5] * 5


def check_values():
    counter = Counter.remote()
    leaf = torch.ones(2, requires_grad=True)
    arrived = ray.get(counter.identity.remote(leaf * 2))
    assert arrived.requires_grad and arrived.is_leaf
    array = np.ones(100_000)
    assert not ray.get(counter.identity.remote(array)).flags.writeable
    assert ray.get(counter.identity.remote(ray.put(7))) == 7  # a reference arrives as its value


def check_calling_back():
    plain, threads, coroutines = Counter.remote(), Counter.options(max_concurrency=2).remote(), AsyncCounter.remote()
    assert isinstance(raised_by(plain.call_back_through.remote(Counter.remote(), plain), timeout=3), TimeoutError)
    for actor in (threads, coroutines):
        assert ray.get(actor.call_back_through.remote(Counter.remote(), actor), timeout=30) == 1


def check_ends():
    counter = Counter.remote()
    pid = ray.get(counter.pid.remote())
    del counter
    wait_until_gone(pid)
    counter = Counter.remote()
    os.kill(ray.get(counter.pid.remote()), signal.SIGKILL)
    assert isinstance(raised_by(counter.increment.remote()), ray.exceptions.ActorDiedError)
    counter = Counter.options(max_restarts=1, max_task_retries=1).remote()
    assert ray.get([counter.increment.remote(), counter.increment.remote()]) == [1, 2]
    os.kill(ray.get(counter.pid.remote()), signal.SIGKILL)
    assert ray.get(counter.increment.remote()) == 1


if __name__ == "__main__":
    ray.init(include_dashboard=False, logging_level="ERROR")
    for check in (check_calls, check_values, check_calling_back, check_ends):
        check()
        print(check.__name__, flush=True)
    ray.shutdown()
