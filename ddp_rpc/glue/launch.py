"""Start the ranks of a job, let them meet, and end every one of them when one is lost.

Runs in every process.  Three ways to start, one path through the code:

    python main.py --world_size 3             spawned: this process starts every rank, and holds the store
    python main.py --world_size 3 --rank 1    one rank per terminal or host: rank 0 holds the store
    torchrun --nproc-per-node 3 main.py       torchrun starts the ranks, and holds the store

The *store* (TCPStore) is a small key-value server where the ranks meet, and show that they live.
"""

import argparse
import contextlib
import logging
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import warnings

import torch.distributed as dist
import torch.multiprocessing as mp

from glue import before_torch, check, ending, timeline, watch
from glue.ending import End, leave_now
from glue.job import Job
from glue.meeting import define_job, store_on
from glue.tensors import keep_freed_memory

GRACE_SECONDS, INTERRUPTED_GRACE_SECONDS = 4.0, 1.0  # for the others to say what they lost, and to leave


def launch(run_worker, args, worker_name):
    """Run `run_worker(rank, args, job)` in every rank, then end this process: the last thing that a main.py does.

    `worker_name(rank, args)` gives each rank's RPC name.  Exit status: 0 done, 1 failed, 2 refused, 128 + the number
    of the signal that interrupted it.
    """
    if args.check and args.rank is None:
        status = check.explain(args)
    elif args.rank is None:
        status = _spawn(run_worker, args, worker_name)
    else:
        status = _run_rank(args.rank, run_worker, args, worker_name)
    leave_now(status or 0)


# ------------------------------------------------------------------------------------------------ one rank of the job


def _run_rank(rank, run_worker, args, worker_name, parent_port=None):
    keep_freed_memory()
    _keep_console_clean(args.debug)
    job = Job(rank, args, worker_name, parent_port)
    try:
        job.join()
        if args.check:
            check.meet(job)
        else:
            job.start_trace()
            run_worker(rank, args, job)
        job.leave()
        if rank == 0 and not job.spawned:
            ending.say_at_the_end(job.lost, args.restarts, job.names)
    except BaseException as error:  # SystemExit too: a rank that leaves early has not done its work
        job.fail(error)


def _keep_console_clean(debug):
    """Silence four known notices of torch, each by its own text."""
    warnings.filterwarnings("ignore", message="You are using a Backend .*ProcessGroupGloo.* as a ProcessGroup")
    # DistributedOptimizer notes that an optimizer in Python holds the GIL.
    noisy = logging.getLogger("torch.distributed.optim.optimizer")
    noisy.addFilter(lambda record: "Creating the optimizer" not in record.msg)
    if not debug:
        shutdown = logging.getLogger("torch.distributed.rpc.api")  # it also raises an error
        shutdown.addFilter(lambda record: "Shutdown Proceed" not in record.msg)
        sys.stderr = _WithoutRemoteTracebacks(sys.stderr)


class _WithoutRemoteTracebacks:
    """sys.stderr, but without the traceback that torch prints in the process that serves a call.

    torch also raises the exception in the caller, and there it is printed.  torch has no switch for the first.
    """

    def __init__(self, stderr):
        self._stderr = stderr
        self._thread = threading.local()

    def write(self, text):
        # print() writes a text, and then the end of its line.
        if text.startswith("On WorkerInfo("):
            self._thread.line_ends = True
            return len(text)
        if text == "\n" and vars(self._thread).pop("line_ends", False):
            return len(text)
        return self._stderr.write(text)

    def __getattr__(self, name):
        return getattr(self._stderr, name)


# ------------------------------------------------------------------------------------------ all ranks on this machine


def _spawn(run_worker, args, worker_name):
    """Start every rank here, again after a loss if --max_restarts allows it; return the exit status."""
    signals = watch.signals_as_bytes()
    for restarts in range(args.max_restarts + 1):
        attempt = argparse.Namespace(**vars(args))
        if restarts:
            ending.print_error(f"restart {restarts} of {args.max_restarts}")
            attempt.restarts, attempt.resume = restarts, True
        end = _spawn_once(run_worker, attempt, worker_name, signals)
        if end is None or not end.again:
            break
    before_torch.stop_fork_server()
    return end.status if end else 0


def _spawn_once(run_worker, args, worker_name, signals):
    """Start every rank and wait until none is left; return the job's End, or None where all work was done."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # loopback only, and any port that is free
    port = listener.getsockname()[1]
    store = dist.PrefixStore(f"attempt{args.restarts}", store_on(listener))
    define_job(store, args)
    before_torch.start_fork_server()
    signal.pthread_sigmask(signal.SIG_BLOCK, before_torch.SIGNALS)  # until all ranks are known, to be told
    ranks = mp.start_processes(
        _run_rank, (run_worker, args, worker_name, port), args.world_size, join=False, start_method="forkserver"
    ).processes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before_torch.SIGNALS)
    attempt = _Attempt(ranks, store, signals, interrupted_grace=INTERRUPTED_GRACE_SECONDS * (3 if args.trace else 1))
    attempt.wait_for_ranks()
    end = attempt.end
    workers = [worker_name(rank, args) for rank in range(args.world_size)]
    names = ending.full_names(workers)
    if end and end.kind != "interrupted" and not attempt.told:
        ending.print_error(f"lost {names[end.rank]}: {end.why}")
    if args.trace:
        try:
            timeline.collect(args.trace, args.trace_window, store, workers, end)
        except OSError as error:  # a full disk, say
            ending.print_error(f"--trace: {error}")
            end = end or End("failed", 0, str(error), again=False)
    if not end:
        ending.say_at_the_end(ending.lost(store), args.restarts, names)
    return end


class _Attempt:
    """The ranks of one attempt, as the process that has started them sees them."""

    def __init__(self, ranks, store, signals, interrupted_grace):
        """`ranks`: their processes, by rank; `signals`: where signals arrive as bytes (see watch.py)."""
        self.ranks, self.store, self.signals, self.interrupted_grace = ranks, store, signals, interrupted_grace
        self.running = {process.sentinel: rank for rank, process in enumerate(ranks)}
        self.end = None  # why the job ends before its work is done, if so
        self.told = False  # a rank has said why
        self.deadline = None  # when those that are still running are killed

    def wait_for_ranks(self):
        """Return when no rank is left."""
        while self.running:
            patience = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            ready = multiprocessing.connection.wait([*self.running, self.signals], patience)
            if self.signals in ready:
                self._interrupted(self.signals.recv(1)[0])
            for sentinel in [each for each in self.running if each in ready]:  # by rank: of several, the first is named
                self._ended(self.running.pop(sentinel))
            # The job goes on without the ranks that are left: they are stopped, and cannot leave by themselves.
            if self.running and not self.end and ending.lost(self.store).keys() >= set(self.running.values()):
                self._kill_after(INTERRUPTED_GRACE_SECONDS)
            if self.deadline and time.monotonic() >= self.deadline:
                for rank in self.running.values():
                    self.ranks[rank].kill()
                self.deadline = time.monotonic() + GRACE_SECONDS

    def _kill_after(self, seconds):
        """Kill the ranks that are still running in so many seconds, or earlier if that was decided before."""
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + seconds)

    def _interrupted(self, number):
        if number not in before_torch.SIGNALS:
            return
        self.end = ending.claim(self.store, ending.interrupted(0, number))
        self.deadline = time.monotonic() + self.interrupted_grace
        for rank in self.running.values():  # a terminal's Ctrl-C reaches them by itself, other signals do not
            with contextlib.suppress(ProcessLookupError):  # it has just left
                os.kill(self.ranks[rank].pid, number)

    def _ended(self, rank):
        process = self.ranks[rank]
        process.join()
        code = process.exitcode
        self.told = self.told or code in (1, 2)  # the glue's own statuses: that rank has printed why
        has_left = self.store.check([f"beat/{rank}"]) and self.store.get(f"beat/{rank}") == b"left"
        if code == 0 and has_left:
            if not self.deadline:  # all have done their work, so every rank should leave now
                self._kill_after(watch.LOST_AFTER_SECONDS)
            return
        how = f"left by itself, with status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if not ending.drop(self.store, rank, how):
            self.end = self.end or ending.claim(self.store, End("lost", rank, how))
            self.deadline = self.deadline or time.monotonic() + GRACE_SECONDS
