"""Start the ranks of a job. There are three ways, and each rank then runs the same code:

python main.py --world_size 3             this process starts all ranks
python main.py --world_size 3 --rank 1    one rank per terminal or host
torchrun --nproc-per-node 3 main.py       torchrun starts the ranks, and sets RANK, WORLD_SIZE, ...
"""

import logging
import os
import signal
import sys
import threading
import warnings

import torch.multiprocessing as mp

from glue import UserError, check, meet, print_error
from glue.host import keep_freed_memory
from glue.job import Job

GRACE_SECONDS = 4.0  # when one rank has ended the job, the others get so long to end by themselves


def launch(run_worker, args, worker_name):
    """Run `run_worker(rank, args, job)` in every rank, then end this process. Each main.py calls this last.

    `worker_name(rank, args)` returns a rank's RPC name. Exit status: 0 if the work was done, 1 if it was not, 2 if this
    rank was refused.
    """
    # Let the kernel end a process that gets one of these signals: at any moment, whatever its threads do. What was
    # ignored at the start, by nohup or a shell's `&`, stays ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if os.getpid() == 1:
        print_error("as process 1, this is not ended by SIGTERM or Ctrl-C: use an init, as in `docker run --init`")
    run_worker = check.run_worker if args.check else run_worker
    workers = [worker_name(rank, args) for rank in range(args.world_size)]
    if args.rank is None:
        os._exit(start_all(run_worker, args, workers))
    run_rank(args.rank, run_worker, args, workers)


def run_rank(rank, run_worker, args, workers, listener=None, starter=None, starters_own=None):
    """Run one rank, and end this process. The last three are of ranks that one process has started: see start_all."""
    if starter:
        if starters_own:
            starters_own.close()
        threading.Thread(target=end_with, args=(starter,), daemon=True).start()
    keep_freed_memory()
    keep_console_clean()
    job = Job(rank, args, workers, listener, starter)
    try:
        job.join()
        run_worker(rank, args, job)
        job.leave()
        if job.lost:
            print(f"The job finished without {', '.join(job.names[lost] for lost in sorted(job.lost))}.")
        if rank == 0 and args.restarts:
            print(f"The job was restarted {args.restarts} time{'s' * (args.restarts > 1)}.")
    except BaseException as error:  # SystemExit as well, because a rank that calls sys.exit has not done its work
        job.fail(error)
    os._exit(0)  # not sys.exit, which would wait for threads of torch


def end_with(starter):
    """End this process when the starting process ends, however that happens."""
    try:
        starter.recv()
    except (EOFError, OSError):
        os._exit(1)


def keep_console_clean():
    """Print whole lines, and what stdout cannot show as \\x...; suppress three known messages of torch."""
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    warnings.filterwarnings("ignore", message="You are using a Backend .*ProcessGroupGloo.* as a ProcessGroup")
    # DistributedOptimizer warns that an optimizer in Python holds the GIL.
    noisy = logging.getLogger("torch.distributed.optim.optimizer")
    noisy.addFilter(lambda record: "Creating the optimizer" not in record.msg)
    shutdown = logging.getLogger("torch.distributed.rpc.api")  # what it logs, it also raises as an error
    shutdown.addFilter(lambda record: "Shutdown Proceed" not in record.msg)


# ------------------------------------------------------------------------------------------ all ranks on this machine


def start_all(run_worker, args, workers):
    """Start every rank on this machine, and wait until all have ended; return the job's exit status."""
    # A fork of this process has torch already, so it begins to work in a tenth of a second. Forks are safe here,
    # because this process has only imported modules. But CUDA does not survive a fork, and macOS has its own reasons.
    method = "spawn" if args.device == "cuda" or sys.platform == "darwin" else "fork"
    if method == "fork" and not args.check:
        # torch's optimizers import it at their first step. Once here takes less time than once in each rank.
        import torch._dynamo  # noqa: F401
    assert method == "spawn" or threading.active_count() == 1, threading.enumerate()
    # The ranks hold the other end of this connection, which ends with this process. Only rank 0 sends something.
    own, theirs = mp.get_context(method).Pipe()
    try:
        listener = meet.listen("127.0.0.1", 0)  # loopback only, and any port that is free
        arguments = (run_worker, args, workers, listener, theirs, own if method == "fork" else None)
        with warnings.catch_warnings():
            # Since Python 3.12, os.fork() warns if there are threads. OpenBLAS has some, and takes care of forks.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            started = mp.start_processes(run_rank, arguments, args.world_size, join=False, start_method=method)
    except (UserError, OSError) as error:  # OSError: too many processes, or open files
        print_error(str(error) if isinstance(error, UserError) else f"cannot start all ranks: {error.strerror}")
        return 1
    listener.close()
    theirs.close()
    pids = [process.pid for process in started.processes]
    codes = {}  # rank -> the exit code of its process, or minus the number of the signal that has killed it
    killed = []  # ranks that have not ended in time
    timer = None
    while len(codes) < args.world_size:
        # Not the processes' sentinels: children of a rank, which it has forked, would hold them open.
        pid, status = os.wait()
        if pid not in pids:  # a helper of Python's multiprocessing
            continue
        rank, code = pids.index(pid), os.waitstatus_to_exitcode(status)
        codes[rank] = code
        # Rank 0 decides what happens when a rank is lost. But it does not know of one that has never connected.
        rank_0_goes_on = args.on_lost == "continue" and own.poll()
        if code and (rank == 0 or not rank_0_goes_on) and not timer:
            timer = threading.Timer(GRACE_SECONDS, kill_the_others, (pids, codes, killed))
            timer.daemon = True
            timer.start()
    return judge(codes, killed, args, workers)


def kill_the_others(pids, codes, killed):
    killed += [rank for rank in range(len(pids)) if rank not in codes]
    for rank in killed:
        os.kill(pids[rank], signal.SIGKILL)


def judge(codes, killed, args, workers):
    """Return the job's exit status, and name a rank that was killed, unless rank 0 has: it prints a line, and ends."""
    if codes[0] == 0 and args.on_lost == "continue":
        return 0
    if codes[0] > 0:
        return codes[0]
    lost = [rank for rank, code in codes.items() if code < 0 and rank not in killed]
    if lost:
        name = signal.Signals(-codes[lost[0]]).name
        print_error(f"lost rank {lost[0]} ({workers[lost[0]]}): killed by {name}")
    failed = [code for code in codes.values() if code > 0]
    return failed[0] if failed else int(any(codes.values()))
