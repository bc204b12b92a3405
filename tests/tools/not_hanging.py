"""Waits of many kinds, all of which end by themselves. In none of them do two wait for each other.

Rank 0 runs one after the other, and prints the name of each.
"""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

SECONDS = 2.5
lock, condition, event, items = threading.Lock(), threading.Condition(), threading.Event(), queue.Queue()
mine = threading.RLock()


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SECONDS)
        return gradient * 2


class Counter:
    def __init__(self, seconds=0):
        time.sleep(seconds)

    def count(self):
        time.sleep(SECONDS)
        return 1


def nap(seconds=SECONDS):
    time.sleep(seconds)


class Named:
    """Functions of the program with the names of waits."""

    @staticmethod
    def shutdown():
        nap()

    @staticmethod
    def wait():
        nap()

    @staticmethod
    def to_here():
        nap()

    @staticmethod
    def backward():
        nap()


def compute():
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        pass


def wait_for_condition():
    with condition:
        condition.wait_for(lambda: False, SECONDS)


def get_with_limit():
    with contextlib.suppress(queue.Empty):
        items.get(timeout=SECONDS)


def acquire_with_limit():
    with lock:
        thread = threading.Thread(target=lambda: lock.acquire(timeout=SECONDS))
        thread.start()
        thread.join()


def behind_a_lock():
    with lock:
        time.sleep(SECONDS)


def in_the_line_of_a_lock():
    with mine, subprocess.Popen(["sleep", str(SECONDS)]):
        pass  # the end of the block waits for the program, and has the lock


def back_and_forth(depth):
    return rpc.rpc_sync(f"w{depth % 2}", back_and_forth, args=(depth - 1,)) if depth else nap()


@rpc.functions.async_execution
def later():
    future = torch.futures.Future()
    threading.Timer(SECONDS, future.set_result, (None,)).start()
    return future


def join_thread(target=nap):
    thread = threading.Thread(target=target, args=(SECONDS,))
    thread.start()
    thread.join()


def wait_for_signal():
    event.wait()
    event.clear()


def send_signal():
    time.sleep(SECONDS)
    event.set()


def reduce(seconds):
    time.sleep(seconds)
    dist.all_reduce(torch.ones(1))


def sync(function, *args):
    return lambda: rpc.rpc_sync("w1", function, args=args)


def several(function, count):
    return lambda: torch.futures.wait_all(tuple(rpc.rpc_async("w1", function) for _ in range(count)))


def retry():
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            rpc.rpc_sync("w1", nap, timeout=1)


def signal_behind_a_lock():
    with lock:
        event.wait()


def signalled_among_many_calls():
    """For moments, no RPC thread of w1 is free. But most of them only handle messages, in C++."""
    waiting = [rpc.rpc_async("w1", signal_behind_a_lock) for _ in range(2)]
    until = time.monotonic() + 2 * SECONDS
    while time.monotonic() < until:
        several(int, 50)()
    rpc.rpc_sync("w1", send_signal)
    torch.futures.wait_all(waiting)


def signalled_by_a_call():
    waiting = rpc.rpc_async("w1", wait_for_signal)
    rpc.rpc_sync("w1", send_signal)
    waiting.wait()


def collective(here, there, function=reduce):
    other = rpc.rpc_async("w1", function, args=(there,))
    reduce(here)
    other.wait()


def take_lock():
    with lock:
        pass


def take_lock_of_w0():
    rpc.rpc_sync("w0", take_lock)


def value_with_limit():
    with lock:
        value = rpc.remote("w1", take_lock_of_w0)
        with contextlib.suppress(RuntimeError):
            value.to_here(timeout=SECONDS)
    value.to_here()


def first_error():
    """wait_all() raises when the first call fails."""
    with lock:
        calls = rpc.rpc_async("w1", nap, args=(2 * SECONDS,), timeout=SECONDS), rpc.rpc_async("w1", take_lock_of_w0)
        with contextlib.suppress(RuntimeError):
            torch.futures.wait_all(calls)
    calls[1].wait()


@rpc.functions.async_execution
def operator():
    return rpc.rpc_async("w0", torch.pinverse, args=(torch.rand(1000, 1000),))


def operator_that_nobody_sees():
    with lock:
        waiting = rpc.rpc_async("w1", take_lock_of_w0)
        rpc.rpc_sync("w1", operator)
    waiting.wait()


def until_an_alarm():
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    with lock, contextlib.suppress(KeyboardInterrupt):
        waiting = rpc.rpc_async("w1", take_lock_of_w0)
        event.wait()
    waiting.wait()


def train():
    y = w = torch.rand(500, 500, requires_grad=True)
    until = time.monotonic() + SECONDS / 2
    while time.monotonic() < until:
        y = torch.tanh(y @ w)
    y.sum().backward()  # in C++


def reduce_after_training(seconds):
    rpc.rpc_sync("w0", train)
    reduce(seconds)


def backward():
    with dist_autograd.context() as context:
        answer = rpc.rpc_sync("w1", Slow.apply, args=(torch.ones(2, requires_grad=True),))
        dist_autograd.backward(context, [answer.sum()])


CASES = {
    "shutdown of the program": sync(Named.shutdown),
    "wait of the program": sync(Named.wait),
    "to_here of the program": sync(Named.to_here),
    "backward of the program": sync(Named.backward),
    "compute": sync(compute),
    "condition with a limit": sync(wait_for_condition),
    "queue with a limit": sync(get_with_limit),
    "lock with a limit": sync(acquire_with_limit),
    "three behind a lock": several(behind_a_lock, 2),
    "a program in the line of a lock": sync(in_the_line_of_a_lock),
    "nested calls": sync(back_and_forth, 3),
    "more calls than RPC threads": several(nap, 6),
    "a Future that is completed later": sync(later),
    "a slow constructor": lambda: rpc.remote("w1", Counter, args=(SECONDS,)).to_here(),
    "a slow method of an RRef": lambda: rpc.remote("w1", Counter).rpc_async().count().wait(),
    "join": sync(join_thread),
    "retried": retry,
    "a thread of C": sync(join_thread, time.sleep),  # no line of this program is on its stack
    "the first error of several calls": first_error,
    "an operator that nobody sees": operator_that_nobody_sees,
    "a collective after training": lambda: collective(0, 0, reduce_after_training),
    "a signal that comes": signalled_by_a_call,
    "many calls": signalled_among_many_calls,
    "the value of an RRef with a limit": value_with_limit,
    "a collective that w0 begins late": lambda: collective(SECONDS, 0),
    "a collective that a call begins late": lambda: collective(0, SECONDS),
    "backward": backward,
    "an alarm": until_an_alarm,  # the last one: nothing is claimed of a main thread that has a handler of SIGALRM
}


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for name, case in CASES.items():
            print(name, flush=True)
            case()
        print("all done", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
