"""Start the ranks of a job, let them meet, and end every one of them when one is lost.

Runs in every process.  Three ways to start, one path through the code:

    python main.py --world_size 3             spawned: this process starts every rank, and holds the store
    python main.py --world_size 3 --rank 1    one rank per terminal or host: rank 0 holds the store
    torchrun --nproc-per-node 3 main.py       torchrun starts the ranks, and holds the store

The *store* (TCPStore) is a small key-value server where the ranks meet, and show that they live.
"""

import contextlib
import logging
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
import warnings

import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

from glue import before_torch, calls, check, ending, timeline, trace, watch
from glue.addresses import store_on
from glue.ending import End, leave_now
from glue.job import Job
from glue.meeting import define_job
from glue.placement import keep_freed_memory

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
    if not status and args.restarts and args.rank in (None, 0):
        print(f"The job was restarted {args.restarts} time{'s' * (args.restarts > 1)}.")
    leave_now(status or 0)


# ------------------------------------------------------------------------------------------------ one rank of the job


def _run_rank(rank, run_worker, args, worker_name, parent_port=None):
    keep_freed_memory()
    _keep_console_clean(args)
    job = Job(rank, args, worker_name, parent_port)
    try:
        job.join()
        calls.watch()
        if args.check:
            check.meet(job)
        else:
            trace.start(job)
            run_worker(rank, args, job)
            trace.hand_in(job, job.main_store)
        job.leave()
        if rank == 0 and not job.spawned:
            ending.say_without(job.lost, args, worker_name)
    except BaseException as error:  # SystemExit too: a rank that leaves early has not done its work
        job.fail(error)


def _keep_console_clean(args):
    """Silence five known notices of torch, each by its own text."""
    warnings.filterwarnings("ignore", message="You are using a Backend .*ProcessGroupGloo.* as a ProcessGroup")
    if not args.debug:  # torch prints a remote call's traceback where it ran, besides raising it at the caller
        rpc.internal.print = lambda *_, **__: None
        shutdown = logging.getLogger("torch.distributed.rpc.api")  # where it also raises: who is lost is ours to say
        shutdown.addFilter(lambda record: "Shutdown Proceed" not in record.msg)
    # DistributedOptimizer would swap torch.optim's optimizers for "functional" ones, deprecated, which step without a
    # lock. Without them it uses torch.optim under a lock of its own, and notes that this holds the GIL.
    if optim := sys.modules.get("torch.distributed.optim.utils"):  # a second to load, so only where it is used
        optim.functional_optim_map.clear()
    noisy = logging.getLogger("torch.distributed.optim.optimizer")
    noisy.addFilter(lambda record: "Creating the optimizer" not in record.msg)


# ------------------------------------------------------------------------------------------ all ranks on this machine


def _spawn(run_worker, args, worker_name):
    """Start every rank here, again after a loss if --max_restarts allows it; return the exit status."""
    signals = watch.signals_as_bytes()
    while True:
        end = _spawn_once(run_worker, args, worker_name, signals)
        if end is None or not end.again or args.restarts == args.max_restarts:
            before_torch.stop_fork_server()
            return end.status if end else 0
        args.restarts, args.resume = args.restarts + 1, True
        ending.print_error(f"restart {args.restarts} of {args.max_restarts}")


def _spawn_once(run_worker, args, worker_name, signals):
    """Start every rank and wait until none is left; return the job's End, or None where all work was done."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # loopback only, and a port that is surely free
    port = listener.getsockname()[1]
    store = dist.PrefixStore(f"attempt{args.restarts}", store_on(listener))
    define_job(store, args)
    before_torch.start_fork_server()
    signal.pthread_sigmask(signal.SIG_BLOCK, before_torch.SIGNALS)  # until all ranks are known, to be told
    ranks = mp.start_processes(
        _run_rank, (run_worker, args, worker_name, port), args.world_size, join=False, start_method="forkserver"
    ).processes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before_torch.SIGNALS)
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    end, told, deadline = None, False, None
    while running:
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait([*running, signals], patience)
        if signals in ready:
            number = signals.recv(1)[0]
            if number not in before_torch.SIGNALS:
                continue
            end = ending.claim(store, ending.interrupted(0, number))
            deadline = time.monotonic() + INTERRUPTED_GRACE_SECONDS * (3 if args.trace else 1)
            for rank in running.values():  # a terminal's Ctrl-C reaches them by itself, other signals do not
                with contextlib.suppress(ProcessLookupError):  # it has just left
                    os.kill(ranks[rank].pid, number)
        for sentinel in set(ready) & set(running):
            rank = running.pop(sentinel)
            ranks[rank].join()
            code = ranks[rank].exitcode
            told = told or code in (1, 2)  # our own: that rank has said why
            if code != 0 or not store.check([f"beat/{rank}"]) or store.get(f"beat/{rank}") != b"left":
                how = f"left by itself, with status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
                if not ending.drop(store, rank, how):
                    end = end or ending.claim(store, End("lost", rank, how))
                    deadline = deadline or time.monotonic() + GRACE_SECONDS
            elif not deadline:  # a rank leaves when all have done their work: who does not leave now was stopped
                deadline = time.monotonic() + watch.LOST_AFTER_SECONDS
        if running and not end and ending.lost(store).keys() >= set(running.values()):  # stopped: it cannot leave
            deadline = min(deadline or float("inf"), time.monotonic() + INTERRUPTED_GRACE_SECONDS)
        if deadline and time.monotonic() >= deadline:
            for rank in running.values():  # a stopped process, say
                ranks[rank].kill()
            deadline = time.monotonic() + GRACE_SECONDS
    if end and end.kind != "interrupted" and not told:
        ending.print_error(f"lost rank {end.rank} ({worker_name(end.rank, args)}): {end.why}")
    if args.trace:
        try:
            timeline.collect(args, store, worker_name, end)
        except OSError as error:  # a full disk, say
            ending.print_error(f"--trace: {error}")
            end = end or End("failed", 0, str(error), again=False)
    if not end:
        ending.say_without(ending.lost(store), args, worker_name)
    return end
