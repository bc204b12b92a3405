"""How a job ends before its work is done: the reason (End), what each rank prints, and ending the process.

Runs in every rank, and in the process that spawned the ranks. Whoever notices a reason to end tells the supervisor,
which decides what the reason is, and tells all ranks.
"""

import _thread
import contextlib
import dataclasses
import os
import re
import signal
import sys
import threading
import traceback

from glue import PACKAGE, UserError, checkpoint

CONNECTION_TROUBLE = re.compile(
    r"\beof\b|tensorpipe|connection|socket|ECONN|broken pipe|tim(ed?|e-) ?out|\b(Dist|TCP)Store", re.I
)
REMOTE_ERROR = re.compile(r"On WorkerInfo\(id=(\d+), name=[\w:-]+\):\n")

# All time limits of the glue, in seconds, except those of --check (check.py). A silent rank is named by the others
# after LOST_AFTER to LOST_AFTER + BEAT, and they have ended GRACE later: within the 15 seconds that docs/RUNNING.md
# promises.
BEAT_SECONDS = 1.0  # between two signs of life of a process
LOST_AFTER_SECONDS = 8.0  # a process that has given no sign of life for so long is lost
KNOWN_AFTER_SECONDS = 12.0  # after the first error that a loss has caused, the supervisor knows of the loss
VERDICT_SECONDS = 2.0  # a rank that fails waits so long for the supervisor's answer
TORCHRUN_SECONDS = 1.5  # after torchrun's SIGTERM a rank waits so long to hear whether another rank is lost
GRACE_SECONDS = 4.0  # the process that has spawned the ranks kills those that do not end by then
CLOSE_SECONDS = 3.0  # rank 0, if it has the supervisor, waits so long until the others have heard why the job ends
WRITE_SECONDS = 2.0  # for a line on a console that may not be read, and for a file that is being written
CONNECT_SECONDS = 5.0  # for one attempt to connect to rank 0; --join_timeout limits all of them
PRINT_AFTER_SECONDS, PRINT_EVERY_SECONDS = 3.0, 30.0  # when a rank that waits for others prints for whom

FORK_SERVER_LOST = "the process from which the ranks are forked has ended"
_printed, _printing = set(), threading.Lock()  # the tracebacks that this process has printed


@dataclasses.dataclass(frozen=True)
class End:
    """Why a job ends, or why it goes on without a rank.

    `rank` is the rank to which it happened, or None. `why` is one line for the user.
    """

    rank: int | None
    why: str
    again: bool = True  # whether a restart may help; False if the user must correct something first, such as a file
    trouble: bool = False  # whether this is an error of a connection: perhaps it happened because another rank is lost
    status: int = 1  # the exit status of each rank that ends for this reason: 128 + its number if it is a signal

    def line(self, names, me=None):
        """Return this reason as rank `me` prints it; None for the starting process. `names`: all ranks."""
        lost = "" if self.rank in (me, None) else f"lost {names[self.rank]}: "
        return f"{lost}{self.why}" if me is None else f"{names[me]}: {lost}{self.why}"


def interrupted(number):
    """Return the End of a job that the signal `number` has interrupted."""
    return End(None, f"interrupted by {signal.Signals(number).name}", again=False, status=128 + number)


def of_exception(error, rank):
    """Return the End for an exception that was raised in this rank, or that a remote call brought back."""
    if isinstance(error, SystemExit):
        return End(rank, f"it called sys.exit({error.code!r}) before its work was done")
    details = traceback.TracebackException.from_exception(error)  # it has a text even if str(error) raises
    kind, why, place = type(error).__name__, str(details), ""
    text = "".join(details.format(chain=False))
    # A remote error reads "On WorkerInfo(...):\n<repr>\n<traceback>". If calls were nested, so is this.
    if remote := [*REMOTE_ERROR.finditer(text)]:
        rank = int(remote[-1][1])
        own = text[remote[-1].end() :].partition("\n\nAt:\n")[0]  # pybind11 appends the place where it raised it again
        lines = [line for line in own.splitlines() if line[:1].strip()]  # the last one is "module.ValueError: ..."
        kind, _, why = (lines or [why])[-1].partition(": ")
        kind = kind.rpartition(".")[2]
        # The mistake may be in the call: the last line before it that is not torch's.
        frames = re.findall(r'^  File "(.*)", line (\d+), in ', text[: remote[-1].start()], re.MULTILINE)
        own_frames = [(file, line) for file, line in frames if "/torch/" not in file]
        place = " (called from {}, line {})".format(*own_frames[-1]) if own_frames else ""
    if kind == BrokenPipeError.__name__:  # nobody reads stdout any more, as in `main.py | head`
        return interrupted(signal.SIGPIPE)
    why = " ".join(why.split()).partition(" Exception raised from ")[0]  # without the C++ stack
    of_user = kind == UserError.__name__
    line = why if of_user else f"{kind}: {why}{place}"
    trouble = isinstance(error, RuntimeError) and CONNECTION_TROUBLE.search(line) is not None
    if error.__cause__ and not trouble:
        trouble = of_exception(error.__cause__, rank).trouble
    return End(rank, line, again=not of_user, trouble=trouble)


def print_mistake(error):
    """Print the traceback of an exception if it is a mistake in the code of this process.

    So not for an error that the user must correct, or that another rank has printed.
    """
    text = "".join(traceback.format_exception_only(error))
    known = isinstance(error, (UserError, BrokenPipeError)) or REMOTE_ERROR.search(text)
    if isinstance(error, Exception) and not known:
        print_traceback(error)


def print_traceback(error):
    """Print where an exception was raised, once: several callers may run into the same mistake."""
    text = "".join(traceback.format_exception(error)).strip()
    with _printing:
        if text not in _printed:
            _printed.add(text)
            print_error(text)


def within(seconds, call):
    """Make this call on another thread, and do not wait longer than `seconds` for it."""
    made = threading.Event()

    def try_it():
        with contextlib.suppress(OSError, ValueError):  # a stream is closed, or cannot be written
            call()
        made.set()

    # A Thread's start() would wait without end for a thread that gets no memory. RuntimeError: no more threads.
    with contextlib.suppress(RuntimeError):
        _thread.start_new_thread(try_it, ())
        made.wait(seconds)


def print_error(text):
    """Print on stderr, if that is possible within seconds: its disk may be full, or nobody may read the pipe."""
    # In one piece with its newline, because the ranks of a job may share this stream.
    within(WRITE_SECONDS, lambda: print(f"{PACKAGE}: {text}\n", end="", file=sys.stderr, flush=True))


def leave_now(status):
    """End this process at once. May be called on any thread; other threads may be in calls that never return."""
    try:
        checkpoint.finish_writing(WRITE_SECONDS)
        within(WRITE_SECONDS, sys.stdout.flush)  # its reader may be gone, or may not read
    finally:
        os._exit(status)
