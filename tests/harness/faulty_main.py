"""Run a package's main.py with a fault in one rank, for faults that a test cannot cause by sending a signal.

    python tests/harness/faulty_main.py PACKAGE RANK FAULT SECONDS [main.py's own flags]

FAULT is raised in that rank when SECONDS have passed since it joined. It is raised by the rank's next RPC. In a rank
that makes no RPCs, the main thread raises it where it waits for the other ranks, for a queue, or for several Futures
(ddp_rpc's master).

    exception, memory, remote    ValueError, MemoryError, KeyError
    sys.exit                     sys.exit(0), on the main thread only
    served exit                  sys.exit(0), only in a function that this rank serves
    stop                         SIGSTOP to itself, when it has read that all ranks have done their work
    none                         no fault

It works with all ways to start ranks. A silent rank is lost after LOST_AFTER seconds, instead of 8 as in main.py, to
save time.
"""

import os
import pathlib
import queue
import signal
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGE, FAULTY_RANK, FAULT, SECONDS = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
LOST_AFTER = 4.0
sys.path.insert(0, str(ROOT / PACKAGE))
sys.argv[0] = str(ROOT / PACKAGE / "main.py")

import main as package_main  # noqa: E402  (the package's main.py, through the path set above)
from glue import supervisor  # noqa: E402

supervisor.LOST_AFTER_SECONDS = LOST_AFTER


def raise_fault():
    in_main_thread = threading.current_thread() is threading.main_thread()
    if FAULT in ("sys.exit", "served exit"):
        if in_main_thread == (FAULT == "sys.exit"):
            sys.exit(0)
        return
    raise {"exception": ValueError, "memory": MemoryError, "remote": KeyError}[FAULT]("injected fault")


def stop_when_all_have_done_their_work(job):
    plain_leave = job.leave

    def leave():
        plain_leave()
        os.kill(os.getpid(), signal.SIGSTOP)

    job.leave = leave


def faulty(plain_call, due):
    def call(*arguments, **keywords):
        if time.monotonic() >= due:
            raise_fault()
        return plain_call(*arguments, **keywords)

    return call


def raise_fault_when_it_is_due(job):
    import torch  # only now: main.py sets environment variables before it imports torch
    from torch.distributed import rpc
    from torch.distributed.rpc import rref_proxy

    due = time.monotonic() + SECONDS
    plain_wait = job.wait_for_all

    def wait_for_all():
        time.sleep(max(0.0, due - time.monotonic()))
        raise_fault()
        plain_wait()

    class ImpatientQueue(queue.SimpleQueue):
        def get(self, *how, **and_how):
            in_main_thread = threading.current_thread() is threading.main_thread()
            if how or and_how or FAULT == "served exit" or not in_main_thread:
                return super().get(*how, **and_how)
            try:
                return super().get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                raise_fault()

    def wait_for_futures(futures):
        if threading.current_thread() is threading.main_thread() and FAULT != "served exit":
            while time.monotonic() < due and not all(future.done() for future in futures):
                time.sleep(0.02)
            raise_fault()
        return plain_wait_for_futures(futures)

    plain_wait_for_futures = torch.futures.wait_all
    torch.futures.wait_all = wait_for_futures
    job.wait_for_all, queue.SimpleQueue = wait_for_all, ImpatientQueue
    # Where this rank begins a call. Further inside, torch continues a call through an RRef in a callback of a Future,
    # and would lose a SystemExit that is raised there: the call then never ends.
    for name in ("rpc_sync", "rpc_async", "remote"):
        setattr(rpc, name, faulty(getattr(rpc, name), due))
    rref_proxy._invoke_rpc = faulty(rref_proxy._invoke_rpc, due)


def run_worker(rank, args, job):
    if rank == FAULTY_RANK and FAULT == "stop":
        stop_when_all_have_done_their_work(job)
    elif rank == FAULTY_RANK and FAULT != "none":
        raise_fault_when_it_is_due(job)
    package_main.run_worker(rank, args, job)


if __name__ == "__main__":
    arguments = package_main.parse_args(sys.argv[5:])
    package_main.launch.launch(run_worker, arguments, package_main.worker_name)
