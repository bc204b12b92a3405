"""Start the ranks of a job, and end all of them when one is lost.

Runs in every process. There are three ways to start a job, and each rank then runs the same code:

    python main.py --world_size 3             spawned: this process starts all ranks, and has the supervisor
    python main.py --world_size 3 --rank 1    one rank per terminal or host: rank 0 has the supervisor
    torchrun --nproc-per-node 3 main.py       torchrun starts the ranks: rank 0 has the supervisor
"""

import argparse
import contextlib
import logging
import multiprocessing.connection
import os
import signal
import sys
import warnings

import torch.multiprocessing as mp

from glue import before_torch, check, checkpoint, ending, say
from glue.ending import BEAT_SECONDS, FORK_SERVER_LOST, GRACE_SECONDS, End, leave_now
from glue.host import keep_freed_memory
from glue.job import Job, full_names
from glue.rendezvous import supervise
from glue.supervisor import DONE

FORK_SERVER_STATUS = 255  # of a rank, as multiprocessing tells it when the fork server cannot tell it any more


def launch(run_worker, args, worker_name):
    """Run `run_worker(rank, args, job)` in every rank, then end this process. Each main.py calls this last.

    `worker_name(rank, args)` returns a rank's RPC name. Exit status: 0 if the work was done, 1 if it failed, 2 if this
    rank was refused, 128 + the signal's number if a signal interrupted the job.
    """
    if args.check:
        run_worker = check.run_worker
    workers = [worker_name(rank, args) for rank in range(args.world_size)]
    if args.rank is None:
        leave_now(_spawn(run_worker, args, workers))
    _run_rank(args.rank, run_worker, args, workers)
    leave_now(0)


# ------------------------------------------------------------------------------------------------ one rank of the job


def _run_rank(rank, run_worker, args, workers):
    keep_freed_memory()
    _keep_console_clean()
    job = Job(rank, args, workers)
    try:
        job.join()
        run_worker(rank, args, job)
        job.leave()
        if rank == 0 and job.lost:
            say(f"The job finished without {', '.join(job.names[lost] for lost in sorted(job.lost))}.")
        if rank == 0 and args.restarts:
            say(f"The job was restarted {args.restarts} time{'s' * (args.restarts > 1)}.")
    except BaseException as error:  # SystemExit as well, because a rank that calls sys.exit has not done its work
        job.fail(error)


def _keep_console_clean():
    """Print characters that stdout cannot show as \\x..., and suppress three known messages of torch by their texts."""
    sys.stdout.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", message="You are using a Backend .*ProcessGroupGloo.* as a ProcessGroup")
    # DistributedOptimizer warns that an optimizer in Python holds the GIL.
    noisy = logging.getLogger("torch.distributed.optim.optimizer")
    noisy.addFilter(lambda record: "Creating the optimizer" not in record.msg)
    shutdown = logging.getLogger("torch.distributed.rpc.api")  # what it logs, it also raises as an error
    shutdown.addFilter(lambda record: "Shutdown Proceed" not in record.msg)


# ------------------------------------------------------------------------------------------ all ranks on this machine


def _spawn(run_worker, args, workers):
    """Start every rank on this machine, and again after a loss if --max_restarts allows it; return the exit status."""
    job_id, names, signals = checkpoint.new_job_id(), full_names(workers), []

    def interrupt(number):
        signals.append(number)
        supervisor.fail(ending.interrupted(number))  # which tells the ranks

    for restarts in range(args.max_restarts + 1):
        if restarts:
            ending.print_error(f"restart {restarts} of {args.max_restarts}")
        supervisor = supervise(args, "127.0.0.1", 0, restarts, job_id)  # loopback only, and any port that is free
        if not restarts:
            before_torch.watch_signals(interrupt)
        if signals:  # it came between two attempts
            supervisor.fail(ending.interrupted(signals[0]))
        statuses = _wait_for(_start(run_worker, args, workers, supervisor), supervisor)
        supervisor.close()
        end = supervisor.end
        if end and end.status < 128 and not statuses & {1, 2}:  # a rank that ends with these has printed the reason
            ending.print_error(end.line(names))
        if not end or not end.again or signals:
            break
    before_torch.stop_fork_server()
    return end.status if end else 0


def _start(run_worker, args, workers, supervisor):
    """Start all ranks; return their processes, by rank."""
    before_torch.start_fork_server()
    host, port = supervisor.listener.getsockname()
    args = argparse.Namespace(**vars(args) | {"master_addr": host, "master_port": port})  # where a rank looks for it
    try:
        # Each rank takes up to five files of this process, three of which are connections to the supervisor and to the
        # store. If they are missing, it is noticed before a rank is started, because later the fork server would print
        # a traceback of its own.
        with contextlib.ExitStack() as copies:
            for _ in range(5 * args.world_size + 16):
                copies.callback(os.close, os.dup(supervisor.listener.fileno()))
        arguments, size = (run_worker, args, workers), args.world_size
        return mp.start_processes(_run_rank, arguments, size, join=False, start_method="forkserver").processes
    except (EOFError, ConnectionError):  # the fork server was killed, perhaps because memory is full
        supervisor.fail(End(None, FORK_SERVER_LOST))
    except OSError as error:  # too many processes, or open files; the ranks that did start end by themselves
        supervisor.fail(End(None, f"cannot start all ranks: {error.strerror}", again=False))
    return []


def _wait_for(processes, supervisor):
    """Wait until all ranks have ended; return their exit statuses. Ranks that should have ended long ago are killed."""
    running, patience = dict(enumerate(processes)), GRACE_SECONDS
    while running:
        sentinels = {process.sentinel: rank for rank, process in running.items()}
        ended = [sentinels[each] for each in multiprocessing.connection.wait(sentinels, BEAT_SECONDS)]
        for rank in ended:
            _judge(rank, running.pop(rank), supervisor)
        if supervisor.end or supervisor.passed() == DONE:
            patience -= 0 if ended else BEAT_SECONDS
        if patience <= 0:
            for process in running.values():
                process.kill()
    return {process.exitcode for process in processes}


def _judge(rank, process, supervisor):
    """Tell the supervisor if this rank's process has not ended because the work is done."""
    process.join()
    code = process.exitcode
    supervisor.wait_until_gone({rank}, BEAT_SECONDS)
    if code or supervisor.passed() < DONE:
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else ""
        end = End(rank, killed or f"its process ended with exit status {code}")
        supervisor.fail(End(None, FORK_SERVER_LOST) if code == FORK_SERVER_STATUS else end)
