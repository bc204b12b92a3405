"""How a job ends before its work is done: a value, the line that each rank prints of it, and leaving.

Runs in every rank and in the process that spawned them.  The first of them that notices it writes an End into the
store.  All others find it there, and print it.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import threading

from glue import PermanentError, checkpoint

PACKAGE = os.path.basename(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STORE_HOLDER = -1  # in place of a rank: the process that holds the store
# A key of the store.  Its value has "workers", the range of ranks that the job can lose as long as one of them is left,
# and "lost": which of them are lost, and why.  Every rank reads it with every beat, so it is kept short.
LOSSES = "losses"
NO_LOSSES = json.dumps({"workers": [0, 0], "lost": {}})
CONNECTION_TROUBLE = re.compile(
    r"\beof\b|tensorpipe|connection|socket|ECONN|broken pipe|tim(ed?|e-) ?out|\b(Dist|TCP)Store", re.I
)
REMOTE_ERROR = re.compile(r"On WorkerInfo\(id=(\d+), name=[\w:-]+\):\n")
# If a served function raises an Exception, torch sends its text together with the rank.  These three are no Exceptions.
# C++ sends their text alone, so the caller cannot know which of the ranks that it has called sent it.
SERVED_EXIT = re.compile(r"(SystemExit|KeyboardInterrupt|GeneratorExit): .*")


@dataclasses.dataclass(frozen=True)
class End:
    """`kind`: one of "lost", "failed", "missing", "interrupted"; `rank`: where it happened; `why`: one line."""

    kind: str
    rank: int
    why: str
    again: bool = True  # whether a restart may help: not where the user must correct something first, such as a file
    signal: int = 0  # the one that interrupted the job

    @property
    def status(self):
        """The exit status of every rank that leaves because of this."""
        return 128 + self.signal if self.kind == "interrupted" else 1


def interrupted(rank, number):
    """Return the End of a job that got this signal."""
    return End("interrupted", rank, f"interrupted by {signal.Signals(number).name}", again=False, signal=number)


def of_exception(error, rank):
    """Return the End for an exception that was raised in this rank, or that a remote call brought back."""
    if isinstance(error, SystemExit):
        return End("failed", rank, f"it left in the middle of its work (sys.exit({error.code!r}))")
    kind, cause = type(error).__name__, str(error)
    remote = list(REMOTE_ERROR.finditer(cause))
    if remote:  # "On WorkerInfo(...):\n<repr>\n<traceback>", nested where calls were: the innermost is the cause
        rank = int(remote[-1][1])
        kind, _, cause = _last_line_of_traceback(cause[remote[-1].end() :]).partition(": ")
        kind = kind.rpartition(".")[2]  # a traceback names the module as well
    if kind == "RuntimeError" and (served_exit := SERVED_EXIT.match(cause)):
        return End("failed", rank, f"a function that it called on another rank ended with {served_exit[0].strip()}")
    permanent = kind == PermanentError.__name__  # its text is written for the user
    line = cause if permanent else f"{kind}: {cause}"
    line = " ".join(line.split()).partition(" Exception raised from ")[0]  # without the stack of C++
    return End("failed", rank, line, again=not permanent)


def is_connection_trouble(error):
    """Return whether this exception, or its cause, suggests that another rank is gone: a heartbeat will show which."""
    while error:
        if isinstance(error, RuntimeError) and CONNECTION_TROUBLE.search(of_exception(error, 0).why):
            return True
        error = error.__cause__
    return False


def line(end, me, names, holder, spawned, mine):
    """Return the line that rank `me` prints on stderr, or None where there is nothing to add.

    `names` of the ranks, `holder` of the store; `spawned`: all write to one terminal; `mine`: this rank has noticed.
    """
    about, why = holder if end.rank == STORE_HOLDER else names[end.rank], end.why
    if end.kind == "interrupted" or (end.rank == me and not mine and spawned):
        return None  # in the second case the rank that received the exception has printed it
    if end.kind == "missing" or end.rank == me or (end.kind == "failed" and mine):
        return f"{names[me] if end.kind == 'missing' else about}: {why}"
    if end.kind == "failed":  # one terminal has the cause already; in others it is repeated
        why = "it failed" if spawned else f"it failed: {why}"
    return f"{names[me]}: lost {about}: {why}"


def full_names(workers):
    """Return each rank's name as users read it, from the workers' names by rank."""
    return [f"rank {rank} ({worker})" for rank, worker in enumerate(workers)]


def claim(store, end):
    """Write `end` into the store as the job's, unless there is one already; return the one that is there."""
    store.compare_set("end", "", "-")
    return read(store.compare_set("end", "-", json.dumps(dataclasses.asdict(end))))


def read(value):
    """Return the End in a value of the store, or None while the job goes on."""
    return None if value == b"-" else End(**json.loads(value))


def can_go_on_without(store, workers):
    """From here on the job goes on without those of `workers`, a range of ranks, that are lost, until the last."""
    store.compare_set(LOSSES, NO_LOSSES, json.dumps({"workers": [workers.start, workers.stop], "lost": {}}))


def drop(store, rank, why):
    """Let the job go on without `rank`; return False if it cannot: it needs this rank, or this is the last worker."""
    found = store.compare_set(LOSSES, "", NO_LOSSES)
    while True:
        losses = json.loads(found)
        workers = range(*losses["workers"])
        if str(rank) in losses["lost"]:
            return True  # another rank has noticed it before
        if rank not in workers or len(losses["lost"]) == len(workers) - 1:
            return False
        losses["lost"][str(rank)] = why
        wanted = json.dumps(losses)
        found = store.compare_set(LOSSES, found, wanted)
        if found == wanted.encode():
            return True


def lost(store):
    """Return {rank: why} of the ranks that the job has gone on without."""
    return read_losses(store.compare_set(LOSSES, "", NO_LOSSES))


def read_losses(value):
    """Return {rank: why} from the store's value."""
    return {int(rank): why for rank, why in json.loads(value)["lost"].items()}


def say_at_the_end(lost, restarts, names):
    """Print which ranks a job that has done its work went on without, and how often it was started again, if so."""
    if lost:
        print(f"The job finished without {', '.join(names[rank] for rank in sorted(lost))}.")
    if restarts:
        print(f"The job was restarted {restarts} time{'s' * (restarts > 1)}.")


def within(seconds, call):
    """Return call(), or None if it takes longer or fails.  Its thread may go on after that."""
    answer = []

    def try_it():
        with contextlib.suppress(RuntimeError):  # from a store that is gone
            answer.append(call())

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


def print_error(text):
    if text:
        print(f"{PACKAGE}: {text}", file=sys.stderr, flush=True)


def leave_now(status, text=None):
    """End this process at once, from any thread: other threads may be in calls that never return."""
    print_error(text)
    checkpoint.finish_writing(seconds=2)
    with contextlib.suppress(OSError):  # the reader may be gone
        sys.stdout.flush()
    os._exit(status)


def _last_line_of_traceback(text):
    """Return "ValueError: ..." from the text of a remote exception: the last line that is not indented."""
    kept = text.partition("\n\nAt:\n")[0].splitlines()  # pybind11 appends where it re-raised
    lines = [line for line in kept if line and not line[0].isspace()]
    return lines[-1] if lines else text
