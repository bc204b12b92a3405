"""Start the ranks of a job, let them meet, and end every one of them when one is lost.  (The same file in all four.)

Runs in every process.  Three ways to start, one path through the code:

    python main.py --world_size 3             spawned: this process starts every rank, and holds the store
    python main.py --world_size 3 --rank 1    one rank per terminal or host: rank 0 holds the store
    torchrun --nproc-per-node 3 main.py       torchrun starts the ranks, and holds the store

The *store* (torch.distributed.TCPStore) is a small key-value server where the ranks meet.  RPC and process groups find
each other through it, and every second each rank counts up a key of its own there, so that the others notice when it
stops: an RPC to a dead peer fails at once, but rpc.shutdown() and a rank that only serves would wait for ever.
"""

import contextlib
import ctypes
import logging
import multiprocessing.connection
import signal
import socket
import time
import warnings

import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.optim.utils import functional_optim_map

from glue import check, trace
from glue.job import SIGNALS, Job, claim_end, leave_now, print_error


def launch(run_worker, args, worker_name):
    """Run `run_worker(rank, args, job)` in every rank, then end this process: the last thing that a main.py does.

    `worker_name(rank, args)` gives each rank's RPC name.  Exit status: 0 done, 1 failed, 2 refused, 130 Ctrl-C.
    """
    if args.check and args.rank is None:
        check.explain(args)
    elif args.rank is not None:
        _run_rank(args.rank, run_worker, args, worker_name)
    else:
        status = _spawn(run_worker, args, worker_name)
        if status:
            leave_now(status)
    if args.restarts and args.rank in (None, 0):
        print(f"The job was restarted {args.restarts} time{'s' * (args.restarts > 1)}.")
    leave_now(0)


# ------------------------------------------------------------------------------------------ one rank of the job


def _run_rank(rank, run_worker, args, worker_name, parent_port=None):
    keep_freed_memory()
    _keep_console_clean(args)
    job = Job(rank, args, worker_name, parent_port)
    try:
        job.join()
        trace.watch_calls()
        if args.check:
            check.meet(job)
        else:
            with trace.recorded(args.trace, rank, worker_name(rank, args), job.spawned, job.wait_for_all):
                run_worker(rank, args, job)
        job.leave()
    except BaseException as error:  # SystemExit too: a rank that leaves early has not done its work
        job.fail(error)


def keep_freed_memory():
    """Let this process keep freed memory for its next tensors (before other threads start; glibc only, else no effect).

    By default malloc returns large blocks to the kernel, and each iteration pays again for faulting them in: a fifth
    of the time of the small models here.  bench.py calls this too, for a fair single-process baseline.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-3, 1 << 30), (-1, 1 << 30), (-8, 1)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX
            mallopt(option, value)


def _keep_console_clean(args):
    """Silence four known notices of torch, each by its own text."""
    warnings.filterwarnings("ignore", message="You are using a Backend .*ProcessGroupGloo.* as a ProcessGroup")
    if not args.debug:  # torch prints a remote call's traceback where it ran, besides raising it at the caller
        rpc.internal.print = lambda *_, **__: None
    # DistributedOptimizer would swap torch.optim's optimizers for "functional" ones, deprecated, which step without a
    # lock. Without them it uses torch.optim under a lock of its own, and notes that this holds the GIL.
    functional_optim_map.clear()
    logging.getLogger("torch.distributed.optim.optimizer").addFilter(
        lambda record: "Creating the optimizer" not in record.msg
    )


# ------------------------------------------------------------------------------------- all ranks on this machine


def _spawn(run_worker, args, worker_name):
    """Start every rank here, again after a loss if --max_restarts allows it; return the exit status."""
    while True:
        status, reason = _spawn_once(run_worker, args, worker_name)
        # A ValueError is the user's to mend (a bad file, say): the next attempt would meet it again.
        if status != 1 or args.restarts == args.max_restarts or "ValueError" in reason["why"]:
            return status
        args.restarts += 1
        args.resume = True
        print_error(f"restart {args.restarts} of {args.max_restarts}")


def _spawn_once(run_worker, args, worker_name):
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # loopback only, and a port that is surely free
    port = listener.getsockname()[1]
    server = dist.TCPStore(
        "127.0.0.1", port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False
    )
    store = dist.PrefixStore(f"attempt{args.restarts}", server)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # children start with them blocked, until job.py can handle them
    context = mp.start_processes(
        _run_rank, (run_worker, args, worker_name, port), args.world_size, join=False, start_method="forkserver"
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    running = {process.sentinel: rank for rank, process in enumerate(context.processes)}
    reason, reported, deadline = None, False, None
    while running:
        try:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended = multiprocessing.connection.wait(list(running), wait)
        except KeyboardInterrupt:
            ended, reason = [], claim_end(store, {"kind": "interrupted", "rank": 0, "why": "Ctrl-C"})
        for sentinel in ended:
            rank = running.pop(sentinel)
            context.processes[rank].join()
            code = context.processes[rank].exitcode
            reported = reported or code in (1, 2, 130)  # our own: that rank has said why
            if code != 0 or not store.check([f"beat/{rank}"]) or store.get(f"beat/{rank}") != b"left":
                how = (
                    f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code} on its own"
                )
                reason = reason or claim_end(store, {"kind": "lost", "rank": rank, "why": how})
        if reason and deadline is None:
            deadline = time.monotonic() + 4  # time for the others to say what they lost and to leave
        elif reason and not ended and time.monotonic() >= deadline:
            for rank in running.values():  # a stopped process, say
                context.processes[rank].kill()
            deadline = None if not running else time.monotonic() + 4
    if not reason:
        return 0, None
    if not reported and reason["kind"] != "interrupted":
        print_error(f"lost rank {reason['rank']} ({worker_name(reason['rank'], args)}): {reason['why']}")
    return 130 if reason["kind"] == "interrupted" else 2 if reason["kind"] == "refused" else 1, reason
