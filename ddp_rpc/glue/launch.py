"""Start the ranks of a job, and end all of them when one is lost.

Runs in every process.  There are three ways to start a job, and each rank then runs the same code:

    python main.py --world_size 3             spawned: this process starts all ranks and holds the store
    python main.py --world_size 3 --rank 1    one rank per terminal or host: rank 0 holds the store
    torchrun --nproc-per-node 3 main.py       torchrun starts the ranks and holds the store

The *store* (torch's TCPStore) is a small key-value server.  The ranks find each other through it, and write their
heartbeats into it.
"""

import argparse
import contextlib
import logging
import multiprocessing.connection
import os
import signal
import socket
import time
import warnings

import torch.distributed as dist
import torch.multiprocessing as mp

from glue import UserError, before_torch, check, ending, timeline, watch
from glue.checkpoint import new_job_id
from glue.ending import End, leave_now
from glue.job import Job
from glue.meeting import define_job, store_on
from glue.tensors import keep_freed_memory

GRACE_SECONDS, INTERRUPTED_GRACE_SECONDS = 4.0, 1.0  # time for the other ranks to print their line and end


def launch(run_worker, args, worker_name):
    """Run `run_worker(rank, args, job)` in every rank, then end this process.  Each main.py calls this last.

    `worker_name(rank, args)` returns a rank's RPC name.  Exit status: 0 if the work was done, 1 if it failed, 2 if this
    rank was refused, 128 + the signal's number if a signal interrupted the job.
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
    _keep_console_clean()
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
            ending.print_losses_and_restarts(job.lost, args.restarts, job.names)
    except BaseException as error:  # SystemExit as well, because a rank that calls sys.exit has not done its work
        job.fail(error)


def _keep_console_clean():
    """Suppress three known messages of torch, each by its own text."""
    warnings.filterwarnings("ignore", message="You are using a Backend .*ProcessGroupGloo.* as a ProcessGroup")
    # DistributedOptimizer warns that an optimizer in Python holds the GIL.
    noisy = logging.getLogger("torch.distributed.optim.optimizer")
    noisy.addFilter(lambda record: "Creating the optimizer" not in record.msg)
    shutdown = logging.getLogger("torch.distributed.rpc.api")  # what it logs, it also raises as an error
    shutdown.addFilter(lambda record: "Shutdown Proceed" not in record.msg)


# ------------------------------------------------------------------------------------------ all ranks on this machine


def _spawn(run_worker, args, worker_name):
    """Start every rank on this machine, and again after a loss if --max_restarts allows it; return the exit status."""
    signals = watch.signals_as_bytes()
    args.job_id = new_job_id()
    for restarts in range(args.max_restarts + 1):
        attempt = argparse.Namespace(**vars(args))
        if restarts:
            ending.print_error(f"restart {restarts} of {args.max_restarts}")
            attempt.restarts = restarts
        end = _spawn_once(run_worker, attempt, worker_name, signals)
        if end is None or not end.again:
            break
    before_torch.stop_fork_server()
    return end.status if end else 0


def _spawn_once(run_worker, args, worker_name, signals):
    """Start every rank and wait until all have ended; return the job's End, or None if all work was done."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # loopback only, and any port that is free
    port = listener.getsockname()[1]
    store = dist.PrefixStore(f"attempt{args.restarts}", store_on(listener))
    define_job(store, args)
    before_torch.start_fork_server()
    # Signals wait until all ranks are known, so that each rank gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, before_torch.SIGNALS)
    ranks = mp.start_processes(
        _run_rank, (run_worker, args, worker_name, port), args.world_size, join=False, start_method="forkserver"
    ).processes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before_torch.SIGNALS)
    attempt = _Attempt(ranks, store, signals, interrupted_grace=INTERRUPTED_GRACE_SECONDS * (3 if args.trace else 1))
    attempt.wait_for_ranks()
    end = attempt.end
    workers = [worker_name(rank, args) for rank in range(args.world_size)]
    names = ending.full_names(workers)
    if end and end.kind != "interrupted" and not attempt.reason_printed:
        ending.print_error(f"lost {names[end.rank]}: {end.why}")
    if args.trace:
        try:
            timeline.collect(args.trace, args.trace_window, store, workers, end)
        except UserError as error:  # for example, the disk is full
            ending.print_error(f"--trace: {error}")
            end = end or End("failed", 0, str(error), again=False)
    if not end:
        ending.print_losses_and_restarts(ending.lost(store), args.restarts, names)
    return end


class _Attempt:
    """One attempt to run the job, in the process that has started its ranks."""

    def __init__(self, ranks, store, signals, interrupted_grace):
        """`ranks`: the processes, by rank; `signals`: a socket that receives signals as bytes (watch.signals_as_bytes).

        `interrupted_grace`: after how many seconds the ranks of an interrupted job are killed.
        """
        self.ranks, self.store, self.signals, self.interrupted_grace = ranks, store, signals, interrupted_grace
        self.running = {process.sentinel: rank for rank, process in enumerate(ranks)}
        self.end = None  # the End, if the job ends before its work is done
        self.reason_printed = False  # whether a rank has printed the reason
        self.deadline = None  # when the ranks that are still running are killed

    def wait_for_ranks(self):
        """Return when all ranks have ended."""
        while self.running:
            patience = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            ready = multiprocessing.connection.wait([*self.running, self.signals], patience)
            if self.signals in ready:
                self._interrupted(self.signals.recv(1)[0])
            for sentinel in [each for each in self.running if each in ready]:  # in the order of ranks
                self._ended(self.running.pop(sentinel))
            # The job has lost all ranks that are still running: these are stopped processes, which must be killed.
            if self.running and not self.end and ending.lost(self.store).keys() >= set(self.running.values()):
                self._kill_after(INTERRUPTED_GRACE_SECONDS)
            if self.deadline and time.monotonic() >= self.deadline:
                for rank in self.running.values():
                    self.ranks[rank].kill()
                self.deadline = time.monotonic() + GRACE_SECONDS

    def _kill_after(self, seconds):
        """Kill the ranks that are still running after so many seconds, or at an earlier deadline if there is one."""
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + seconds)

    def _interrupted(self, number):
        if number not in before_torch.SIGNALS:
            return
        self.end = ending.claim(self.store, ending.interrupted(0, number))
        self.deadline = time.monotonic() + self.interrupted_grace
        for rank in self.running.values():  # Ctrl-C reaches them through the terminal; other signals must be sent
            with contextlib.suppress(ProcessLookupError):  # the process has just ended
                os.kill(self.ranks[rank].pid, number)

    def _ended(self, rank):
        process = self.ranks[rank]
        process.join()
        code = process.exitcode
        if code in (1, 2):  # the glue's own exit statuses: this rank has printed the reason
            self.reason_printed = True
        has_left = self.store.check([f"beat/{rank}"]) and self.store.get(f"beat/{rank}") == b"left"
        if code == 0 and has_left:
            if not self.deadline:  # a rank leaves only when all have done their work, so all others should end now
                self._kill_after(watch.LOST_AFTER_SECONDS)
            return
        how = f"its process ended with exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if not ending.drop(self.store, rank, how):
            self.end = self.end or ending.claim(self.store, End("lost", rank, how))
            self.deadline = self.deadline or time.monotonic() + GRACE_SECONDS
