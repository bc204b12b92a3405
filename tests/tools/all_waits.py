"""A thread for each way to wait that tools/rpctrace/waits.py knows, and for some that it does not. Two ranks, of which
the second one only joins. The value of WAITS is what the tool has to say of the thread.
"""

import concurrent.futures
import datetime
import os
import queue
import select
import subprocess
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

lock, again, condition = threading.Lock(), threading.RLock(), threading.Condition()
HOUR, entered = 3600, threading.Barrier(2)
SIGNAL, OUTSIDE = "a signal of another thread of w0", "it runs, or waits for something outside"


def holds_all():
    with lock, again, condition:
        entered.wait()
        time.sleep(HOUR)


def with_lock():
    with lock:
        pass


def acquire_again():
    again.acquire()


def enter_condition():
    with condition:
        pass


def never():
    time.sleep(HOUR)


def executor():
    concurrent.futures.ThreadPoolExecutor(1, "pool").submit(never).result()


def idle_executor():
    """The thread of an executor takes over the name of this one."""
    name, threading.current_thread().name = threading.current_thread().name, "started"
    executor = concurrent.futures.ThreadPoolExecutor(1, initializer=lambda: rename_to(name))
    executor.submit(int).result()
    never()


def rename_to(name):
    threading.current_thread().name = name


def key_in_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(hours=1))
    store.get("key")


def joins():
    thread = threading.Thread(target=never, name="joined")
    thread.start()
    thread.join()


def work():
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()


def rref():
    rpc.remote("w1", never, timeout=HOUR).to_here(timeout=HOUR)


def local_value():
    rref = rpc.remote("w0", never, timeout=HOUR)
    rref.local_value()


def answer():
    future = rpc.rpc_async("w1", never, timeout=HOUR)
    future.wait()


WAITS = {
    with_lock: "`lock`, which its thread holds_all holds",
    acquire_again: "`again`, which its thread holds_all holds",
    enter_condition: "`condition`, which its thread holds_all holds",
    lambda: threading.Event().wait(): f"{SIGNAL} (Event)",
    lambda: threading.Semaphore(0).acquire(): f"{SIGNAL} (Semaphore)",
    lambda: threading.Barrier(2).wait(): f"{SIGNAL} (Barrier)",
    lambda: queue.Queue().get(): f"{SIGNAL} (Queue)",
    lambda: torch.futures.Future().wait(): "a Future",
    executor: f"{SIGNAL} (Future)",
    idle_executor: f"{SIGNAL} (the queue of an executor)",
    joins: "the end of thread joined",
    key_in_store: "a key in a store, with a time limit",
    lambda: dist.new_group([0, 1]): "the members of a new group",
    work: "a collective, or a message",
    rref: "the value of an RRef: w1's answer to never",
    local_value: "the value of an RRef",
    answer: "w1's answer to never",
    lambda: rpc.rpc_sync("w1", never, timeout=HOUR): "w1's answer",
    never: "it sleeps",
    lambda: select.select([os.pipe()[0]], [], []): OUTSIDE,
    lambda: subprocess.Popen(["sleep", str(HOUR)]).wait(): OUTSIDE,
    rpc.shutdown: "calls that are not answered",
}


def main():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    if rank == 0:
        threading.Thread(target=holds_all, name="holds_all").start()
        entered.wait()
        for number, function in enumerate(WAITS):
            threading.Thread(target=function, name=f"{number} {function.__name__}").start()
        print("all wait", flush=True)
        never()
    rpc.shutdown()


if __name__ == "__main__":
    main()
