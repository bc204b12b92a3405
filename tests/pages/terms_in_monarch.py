"""Assert what docs/MIGRATING.md states about Monarch. test_migrating.py runs this in a Python that has Monarch."""

import asyncio
import os
import signal
import time

import monarch
import torch
from monarch.actor import Actor, ActorError, concurrent_endpoint, endpoint, get_or_spawn_controller, this_host


class Counter(Actor):
    def __init__(self):
        self.count = 0

    @endpoint
    def increment(self):
        self.count += 1
        return self.count

    @endpoint
    def fail(self):
        raise KeyError("no such key")

    @endpoint
    def identity(self, value):
        return value

    @endpoint
    def sleep(self, seconds):
        time.sleep(seconds)

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def call_back_through(self, other, me):
        return other.increment_of.call_one(me).get()

    @endpoint
    def increment_of(self, other):
        return other.increment.call_one().get()

    @endpoint
    def increment_actor_by_name(self):
        return get_or_spawn_controller("ps", Counter).get().increment.call_one().get()


class Gate(Actor):
    def __init__(self):
        self.ports = []

    @endpoint(explicit_response_port=True)
    def meet(self, port, number):
        self.ports.append(port)
        if len(self.ports) == number:
            for each in self.ports:
                each.send(number)


class AsyncCounter(Actor):
    def __init__(self):
        self.waiting = 0
        self.all_have_arrived = asyncio.Event()

    @endpoint
    async def increment(self):
        return 1

    @concurrent_endpoint
    async def call_back_through(self, other, me):
        return await other.increment_of.call_one(me)

    @concurrent_endpoint
    async def meet(self, number):
        self.waiting += 1
        if self.waiting == number:
            self.all_have_arrived.set()
        await self.all_have_arrived.wait()
        return self.waiting


class Doubling(Actor):
    @endpoint(propagate=lambda x: x)
    def double(self, x):
        return 2 * x


def spawn(cls):
    """Return (the actor, its process)."""
    process = this_host().spawn_procs(per_host={"gpus": 1})  # distributed tensors need the name "gpus", also on a CPU
    return process.spawn("actor", cls), process


def raised_by(future, timeout=60):
    try:
        future.get(timeout=timeout)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def check_calls():
    counter, _ = spawn(Counter)
    futures = [counter.increment.call_one() for _ in range(3)]
    assert [future.get() for future in futures] == [1, 2, 3]  # one at a time, in order
    named = get_or_spawn_controller("ps", Counter).get()
    assert named.increment.call_one().get() == 1
    assert counter.increment_actor_by_name.call_one().get() == 2
    error = raised_by(counter.fail.call_one())
    assert isinstance(error, ActorError) and "KeyError: 'no such key'" in str(error)
    assert isinstance(raised_by(counter.sleep.call_one(1), timeout=0.1), TimeoutError)
    for cls in (Gate, AsyncCounter):
        gate, _ = spawn(cls)
        futures = [gate.meet.call_one(5) for _ in range(5)]
        assert [future.get() for future in futures] == [5] * 5


def check_values():
    counter, _ = spawn(Counter)
    leaf = torch.ones(2, requires_grad=True)
    arrived = counter.identity.call_one(leaf * 2).get()
    assert arrived.requires_grad and arrived.is_leaf


def check_autograd_of_distributed_tensors():
    actor, process = spawn(Doubling)
    with process.activate():
        x = torch.ones(2, 3, requires_grad=True)
        (3 * x).sum().backward()  # operations of torch on a tensor in the other process
        assert monarch.fetch_shard(x.grad).result(timeout=60).tolist() == [[3.0] * 3] * 2
        assert not actor.double.rref(x).requires_grad  # Python code of an actor


def check_calling_back():
    (plain, _), (other, _) = spawn(Counter), spawn(Counter)
    coroutines, _ = spawn(AsyncCounter)
    assert coroutines.call_back_through.call_one(other, coroutines).get(timeout=60) == 1
    assert isinstance(raised_by(plain.call_back_through.call_one(other, plain), timeout=3), TimeoutError)


def check_ends():
    counter, process = spawn(Counter)
    pid = counter.pid.call_one().get()
    process.stop("checked").get()
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} has not ended"
        time.sleep(0.05)
    failures = []
    monarch.actor.unhandled_fault_hook = failures.append  # Monarch's own hook ends this program
    counter, _ = spawn(Counter)
    os.kill(counter.pid.call_one().get(), signal.SIGKILL)
    assert type(raised_by(counter.increment.call_one())).__name__ == "SupervisionError"
    assert failures


if __name__ == "__main__":
    checks = (check_calls, check_values, check_autograd_of_distributed_tensors, check_ends, check_calling_back)
    for check in checks:
        check()
        print(check.__name__, flush=True)
    os._exit(0)  # an actor of the last check waits forever
