"""Start the ranks of a job. There are three ways, and each rank then runs the same code:

python main.py --world_size 3             this process starts all ranks
python main.py --world_size 3 --rank 1    one rank per terminal or host
torchrun --nproc-per-node 3 main.py       torchrun starts the ranks, and sets RANK, WORLD_SIZE, ...
"""

import gc
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings

from glue import UserError, check, host, meet, print_error
from glue.errors import mend_torch
from glue.host import keep_freed_memory
from glue.job import Job

import torch.multiprocessing as mp

GRACE_SECONDS = 4.0  # when one rank has ended the job, the others get so long to end by themselves


def launch(run_worker, args, scenario):
    """Run `run_worker(rank, args, job)` in every rank, then end this process. Each main.py calls this last.

    `scenario(args)` returns the Scenario of these flags. Exit status: 0 if the work was done, 1 if it was not, 2 if
    this rank was refused.
    """
    # Let the kernel end a process that gets one of these signals: at any moment, whatever its threads do. What was
    # ignored at the start, by nohup or a shell's `&`, stays ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    host.allow_open_files()
    if args.rank is None:
        os._exit(start_all(run_worker, args, scenario))
    run_rank(args.rank, run_worker, args, scenario)


def run_rank(rank, run_worker, args, scenario, listener=None):
    """Run one rank, and end this process. `listener`: of ranks that one process has started, see start_all."""
    keep_freed_memory()
    if listener:
        threading.Thread(target=end_with_the_starter, daemon=True).start()
        if rank == 0 and not args.check:
            import torch._dynamo  # noqa: F401  # for the optimizer, unless start_all has done it
    keep_console_clean()
    mend_torch()
    args.rank = rank
    job = Job(args, listener)
    try:
        job.join(scenario)
        (check.run_worker if args.check else run_worker)(rank, args, job)
        job.wait_for_all(last=True)
        if job.lost:
            print(f"The job finished without {', '.join(job.names[lost] for lost in sorted(job.lost))}.")
    except BaseException as error:  # SystemExit as well, because a rank that calls sys.exit has not done its work
        job.fail(error)
    else:
        os._exit(0)  # not sys.exit, which would wait for threads of torch


def end_with_the_starter():
    """End this process when the starting process ends, however that happens, even if this one ignores SIGINT."""
    multiprocessing.parent_process().join()
    os._exit(1)


def keep_console_clean():
    """Print whole lines, and what stdout cannot show as \\x...; suppress three known messages of torch."""
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    warnings.filterwarnings("ignore", message="You are using a Backend .*ProcessGroupGloo.* as a ProcessGroup")
    # DistributedOptimizer warns that an optimizer in Python holds the GIL. What shutdown logs, it also raises.
    for name in ("torch.distributed.optim.optimizer", "torch.distributed.rpc.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def start_all(run_worker, args, scenario):
    """Start every rank on this machine, and wait until all have ended; return the job's exit status."""
    # A fork of this process has torch already, so it begins to work in a tenth of a second. Forks are safe here,
    # because this process has only imported modules. But CUDA does not survive a fork, and macOS has its own reasons.
    # Nor do threads: a debugger may have started some.
    forks = args.device != "cuda" and sys.platform != "darwin" and threading.active_count() == 1
    if forks and not args.check and scenario(args).device_ranks != [0]:
        # torch's optimizers import it when they are made. Once here takes less time than once in each rank. But if only
        # rank 0 computes, it imports it itself, while the others start.
        import torch._dynamo  # noqa: F401
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, the kernel keeps no exit codes
    method = "fork" if forks else "spawn"
    try:
        host.transports_of([host.offer(args, uses_gpu=False)] * args.world_size)  # raises if they cannot work
        listener = meet.listen("127.0.0.1", 0)  # loopback only, and any port that is free
        args.master_addr, args.master_port = listener.getsockname()
        arguments = (run_worker, args, scenario, listener)
        # The ranks share the memory of the modules. Their garbage collectors would write to it, and the kernel would
        # copy it then, which costs each rank 8 ms and 8 MB.
        gc.freeze()
        started = mp.start_processes(run_rank, arguments, args.world_size, join=False, start_method=method)
    except (OSError, UserError) as error:  # too many processes, or open files
        print_error(f"cannot start all ranks: {getattr(error, 'strerror', error)}")
        return 1
    listener.close()
    return wait_for(started.processes, args.on_lost, scenario(args).names)


def wait_for(processes, on_lost, names):
    """Wait until all ranks have ended; return the job's exit status, and name a rank that was killed.

    Unless rank 0 has named it: it prints a line, and ends with status 1.
    """
    # With --on_lost continue rank 0 decides what the end of another rank means.
    deciding = processes[:1] if on_lost == "continue" else processes
    deadline = math.inf
    while any(each.exitcode is None for each in processes) and time.monotonic() < deadline:
        time.sleep(0.02)  # not until a sentinel is ready: a child that a rank has forked would hold it open
        if any(each.exitcode for each in deciding):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    codes = [each.exitcode or 0 for each in deciding]  # minus the number of a signal that has killed it
    for process in processes:
        process.kill()
        process.join()
    killed = [rank for rank, code in enumerate(codes) if code < 0]
    if killed and codes[0] <= 0:  # with another status, rank 0 has printed why
        number = -codes[killed[0]]
        signal_name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
        print_error(f"lost {names[killed[0]]}: killed by {signal_name}")
    return codes[0] if codes[0] > 0 else int(any(codes))
