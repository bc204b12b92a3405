"""How a job ends before its work is done: the reason (End), the line that each rank prints, and ending the process.

Runs in every rank, and in the process that spawned the ranks.  The first process that notices a reason to end writes an
End into the store.  All others read it from the store and print it.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import threading
import traceback

from glue import UserError, checkpoint

PACKAGE = os.path.basename(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STORE_HOLDER = -1  # used instead of a rank for the process that holds the store
# A key of the store.  Its value has two entries.  "workers" is a range of ranks: the job can lose all of them but one.
# "lost" names those that are lost, each with the reason.  Every rank reads this key at every heartbeat, so the value is
# kept short.
LOSSES = "losses"
NO_LOSSES = json.dumps({"workers": [0, 0], "lost": {}})
CONNECTION_TROUBLE = re.compile(
    r"\beof\b|tensorpipe|connection|socket|ECONN|broken pipe|tim(ed?|e-) ?out|\b(Dist|TCP)Store", re.I
)
REMOTE_ERROR = re.compile(r"On WorkerInfo\(id=(\d+), name=[\w:-]+\):\n")

_printed, _printing = set(), threading.Lock()  # the tracebacks that this process has printed


@dataclasses.dataclass(frozen=True)
class End:
    """Why a job ends.

    `kind` is "lost", "failed", "missing" or "interrupted".  `rank` is the rank to which it happened.  `why` is one line
    for the user.
    """

    kind: str
    rank: int
    why: str
    again: bool = True  # whether a restart may help; False if the user must correct something first, such as a file
    signal: int = 0  # the number of the signal that interrupted the job

    @property
    def status(self):
        """The exit status of every rank that ends for this reason."""
        return 128 + self.signal if self.kind == "interrupted" else 1


def interrupted(rank, number):
    """Return the End of a job that the signal `number` has interrupted."""
    return End("interrupted", rank, f"interrupted by {signal.Signals(number).name}", again=False, signal=number)


def of_exception(error, rank):
    """Return the End for an exception that was raised in this rank, or that a remote call brought back."""
    if isinstance(error, SystemExit):
        return End("failed", rank, f"it called sys.exit({error.code!r}) before its work was done")
    kind, cause = type(error).__name__, str(error)
    remote = list(REMOTE_ERROR.finditer(cause))
    if remote:  # "On WorkerInfo(...):\n<repr>\n<traceback>", nested if calls were nested: the innermost is the cause
        rank = int(remote[-1][1])
        kind, _, cause = _last_line_of_traceback(cause[remote[-1].end() :]).partition(": ")
        kind = kind.rpartition(".")[2]  # a traceback names the module as well
    of_user = kind == UserError.__name__
    line = " ".join((cause if of_user else f"{kind}: {cause}").split())
    line = line.partition(" Exception raised from ")[0]  # without the C++ stack
    if remote and not of_user:
        line += _place_of_call(error, str(error)[: remote[-1].start()])
    return End("failed", rank, line, again=not of_user)


def _place_of_call(error, text):
    """Return " (called from FILE, line N)" for a call that has failed on another rank; the mistake may be in the call.

    `text`: of the error, from before that rank's own text; if calls were nested, it has the traceback of the caller.
    """
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    places += re.findall(r'^  File "(.*)", line (\d+), in ', text, re.MULTILINE)
    own = [f" (called from {file}, line {line})" for file, line in places if "/torch/" not in file]
    return own[-1] if own else ""


def print_traceback(error):
    """Print where an exception was raised, so that people who edit this code find their line.

    Nothing is printed for an error that the user must correct, for one that another rank has printed, and for one that
    this rank has printed: several callers may run into the same mistake.
    """
    if isinstance(error, Exception) and not isinstance(error, UserError) and not REMOTE_ERROR.search(str(error)):
        text = "".join(traceback.format_exception(error)).strip()
        with _printing:
            if text not in _printed:
                _printed.add(text)
                print_error(text)


def is_connection_trouble(error):
    """Return whether this exception, or one of its causes, suggests that another rank has died.

    The exception does not reliably name that rank; its missing heartbeat does.
    """
    while error:
        if isinstance(error, RuntimeError) and CONNECTION_TROUBLE.search(of_exception(error, 0).why):
            return True
        error = error.__cause__
    return False


def line(end, me, names, holder, spawned):
    """Return the line that rank `me` prints on stderr, or None if it prints nothing.

    `names`: the ranks as the user reads them; `holder`: the process that holds the store; `spawned`: whether all ranks
    write to one terminal, where one line is enough for an error that the user must correct.
    """
    if end.kind == "interrupted" or (spawned and end.kind == "failed" and not end.again and end.rank != me):
        return None
    if end.kind == "missing" or end.rank == me:
        return f"{names[me]}: {end.why}"
    return f"{names[me]}: lost {holder if end.rank == STORE_HOLDER else names[end.rank]}: {end.why}"


def full_names(workers):
    """Return each rank's name as the user reads it: "rank 1 (observer1)".  `workers`: the worker names, by rank."""
    return [f"rank {rank} ({worker})" for rank, worker in enumerate(workers)]


def claim(store, end):
    """Write `end` into the store, unless the store has an End already.  Return the End that is in the store."""
    store.compare_set("end", "", "-")
    return read(store.compare_set("end", "-", json.dumps(dataclasses.asdict(end))))


def read(value):
    """Return the End that this value of the store contains, or None if the job is still running."""
    return None if value == b"-" else End(**json.loads(value))


def can_go_on_without(store, workers):
    """From now on, if a rank in the range `workers` is lost, the job goes on without it, unless none would be left."""
    store.compare_set(LOSSES, NO_LOSSES, json.dumps({"workers": [workers.start, workers.stop], "lost": {}}))


def drop(store, rank, why):
    """Let the job go on without `rank`.

    Return False if that is impossible, because the job needs this rank or because it is the last worker.
    """
    found = store.compare_set(LOSSES, "", NO_LOSSES)
    while True:
        losses = json.loads(found)
        workers = range(*losses["workers"])
        if str(rank) in losses["lost"]:
            return True  # another rank has recorded the loss already
        if rank not in workers or len(losses["lost"]) == len(workers) - 1:
            return False
        losses["lost"][str(rank)] = why
        wanted = json.dumps(losses)
        found = store.compare_set(LOSSES, found, wanted)
        if found == wanted.encode():
            return True


def lost(store):
    """Return {rank: why} for the ranks that the job has lost and gone on without."""
    return read_losses(store.compare_set(LOSSES, "", NO_LOSSES))


def read_losses(value):
    """Return {rank: why} from the value of the key LOSSES."""
    return {int(rank): why for rank, why in json.loads(value)["lost"].items()}


def print_losses_and_restarts(lost, restarts, names):
    """After a job has done its work, print which ranks it lost on the way, and how often it was restarted, if any."""
    if lost:
        print(f"The job finished without {', '.join(names[rank] for rank in sorted(lost))}.")
    if restarts:
        print(f"The job was restarted {restarts} time{'s' * (restarts > 1)}.")


def within(seconds, call):
    """Return call(), or None if it fails or takes more than `seconds`.  Its thread may go on after that."""
    answer = []

    def try_it():
        # RuntimeError: the store is gone; the others: a stream is closed, or cannot be written.
        with contextlib.suppress(RuntimeError, OSError, ValueError, AttributeError):
            answer.append(call())

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


def print_error(text):
    """Print on stderr, if that is possible within seconds: its disk may be full, or nobody may read the pipe."""
    if text:
        within(2, lambda: print(f"{PACKAGE}: {text}", file=sys.stderr, flush=True))


def leave_now(status, text=None):
    """End this process at once.  May be called on any thread; other threads may be in calls that never return."""
    try:
        print_error(text)
        checkpoint.finish_writing(seconds=2)
        within(2, lambda: sys.stdout.flush())  # its reader may be gone, or may not read
    finally:
        os._exit(status)


def _last_line_of_traceback(text):
    """Return, from the text of a remote exception, its last line that is not indented: "ValueError: ..."."""
    kept = text.partition("\n\nAt:\n")[0].splitlines()  # pybind11 appends the place where it raised it again
    lines = [line for line in kept if line and not line[0].isspace()]
    return lines[-1] if lines else text
