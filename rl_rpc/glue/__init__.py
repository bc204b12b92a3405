"""The glue: starting and watching processes, flags and checkpoints. Each file has one topic. In reading order:

    before_torch   what must happen before torch is imported
    launch         start the ranks: all of them from one process, one by one, or by a launcher
    job            the `job` that run_worker gets: how a rank joins the job, goes on without a lost rank, and leaves
    rendezvous     how a rank finds the supervisor, and on which network interface it listens
    supervisor     one connection per rank: who has joined, who waits, who is lost, when the job ends
    ending         how a job ends before its work is done, and the line that each rank prints then; all time limits
    flags          the flags that all four packages share, and the rank that a launcher gives (torchrun, Slurm, ...)
    report         what a run prints and writes: lines, progress bar, curves, summary, picture; the time of its steps
    checkpoint     write files completely or not at all; save and load checkpoints
    host           GPUs, cores, transports and memory of this machine
    seeds          random numbers that depend on --seed alone
    check          --check: what a job finds on its hosts, and the time of an RPC

All four packages have identical copies: edit rl_rpc/glue, then run `python tools/sync_glue.py`.
"""

import os

PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE = os.path.basename(PACKAGE_FOLDER)


class UserError(ValueError):
    """Something that the user must correct: a bad file, a port that is taken, training that diverges.

    Its text is one line for the user, printed without a traceback, and --max_restarts does not start the job again.
    Any other exception is a mistake in the code, and its traceback is printed.
    """


def say(text):
    """Print a line on stdout. Raises UserError if that is not possible, for example because a disk is full."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # nobody reads it any more: see ending.py
        raise
    except OSError as error:
        raise UserError(f"cannot write to stdout: {error.strerror}") from None
