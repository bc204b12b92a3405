"""What a thread waits for: the tables of the waits that are recognised, and how a stack is looked up in them.

OF_PYTHON_AND_TORCH has the functions of Python's and torch's own files. OF_C has the methods of C code, which are on no
stack: the line of the program tells them (facts.MayWait). signal() reads threading.py, queue.py and concurrent/futures,
and line_wait() also knows `with lock:`. Everything else counts as running, or as waiting for something outside: a
sleep, input(), select, a socket, another program. Such a thread is alive, and nothing is claimed about it.

For example, with the innermost function on the left, these stacks tell:

    work (program)                                            the line, `with lock:` or `queue.get()`, which waits in C
    __enter__ (threading.py), work (program)                  the line, `with condition:`
    wait, wait (threading.py), work (program)                 the outer wait is that of an Event: what the program uses
    wait (futures), rpc_sync (api.py), work (program)         the first one that has a row: an answer
    get (store), init_rpc (rpc/__init__.py), work (program)   init_rpc: to ask the store is one of its steps
"""

import itertools
import os
from dataclasses import replace
from typing import NamedTuple

from rpctrace import facts
from rpctrace.evidence import Frame, Wait

SIGNALS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")  # in which threads wait for each other
ENTRY = ("start", "run", "_bootstrap", "_bootstrap_inner")  # of Thread: they do not wait for its end
API, C10D, FUTURES = "/distributed/rpc/api.py", "/distributed/distributed_c10d.py", "/torch/futures/__init__.py"
INIT, GRAPH, EXECUTOR = "/distributed/rpc/__init__.py", "/torch/autograd/graph.py", "/concurrent/futures/thread.py"
NOBODY = "tqdm/_monitor.py"  # the file of a thread that wakes nobody
OF_ALL = ("all_", "barrier", "reduce_scatter")  # so begin the collectives that nobody ends before all have begun
MEETINGS = ("_wait_all_workers", "init_rpc", "init_process_group", "new_group")  # in which all ranks come together


class Row(NamedTuple):
    where: str  # the end of the file's name. Or in OF_C: the classes that have the method, "?" if it may be unknown
    functions: str  # separated by blanks, "*" for all
    wait: object  # the Wait, or a function that returns it: of the frame, or for C code of the MayWait

    def wait_of(self, seen):
        return self.wait(seen) if callable(self.wait) else replace(self.wait)  # a copy, because others change it


def end(what):
    """Return a wait of which it is not known who ends it: it can only be the end of a chain."""
    return Wait(what=what)


ANSWER = Wait("answer")
OF_PYTHON_AND_TORCH = (
    Row(API, "rpc_sync", ANSWER),
    Row(FUTURES, "wait wait_all", ANSWER),
    Row(API, "_wait_all_workers", lambda frame: Wait("shutdown", timed=bool(frame.value("timeout", 0.0)))),
    Row(API, "shutdown", end("calls that are not answered")),
    Row(INIT, "init_rpc", lambda frame: Wait("init", frame.function)),
    Row(C10D, "init_process_group", lambda frame: Wait("init", frame.function)),
    Row(C10D, "new_group _new_group_with_tag split_group", end("the members of a new group")),
    Row(C10D, "*", lambda frame: Wait("collective", frame.function) if "group" in frame.names else None),
    Row(GRAPH, "_engine_run_backward", end("a backward pass")),
    Row(EXECUTOR, "_worker", Wait("signal", "the queue of an executor")),
    # signal() reads threading.py, queue.py and concurrent/futures: Condition, Event, Queue, Thread.join and so on.
)
OF_C = (  # its methods stand in facts.WAITING, too
    Row("lock RLock Condition", "acquire", lambda one: Wait("lock", locks=one.things, timed=one.limited)),
    Row("SimpleQueue", "get", lambda one: Wait("signal", "SimpleQueue", timed=one.limited)),
    Row("Work", "wait", end("a collective, or a message")),
    Row("Store TCPStore FileStore PrefixStore", "get wait add", end("a key in a store, with a time limit")),
    Row("PyRRef ?", "to_here", Wait("answer", "the value of an RRef")),
    Row("PyRRef ?", "local_value", end("the value of an RRef")),
    Row("Future ?", "wait", ANSWER),
    Row("module ?", "backward", end("gradients from other workers")),
)


def read(frames, still, ran):
    """Return the innermost line of the program in a stack, and what the thread waits for there.

    `still`: it has not moved; `ran`: it has used the CPU.
    """
    within = list(itertools.takewhile(lambda frame: frame.library, frames))
    lines = frames[: len(within) + 1]
    place = lines[-1] if len(lines) > len(within) else Frame()
    # A meeting comes first, and the outermost counts. What it does within, such as to ask a store, is one of its steps.
    meetings = [frame for frame in within if frame.function in MEETINGS and row_wait(frame)]
    if not still:  # who joins a group asks the store again and again; everybody else has to stand still
        meetings = [frame for frame in meetings if frame.path.endswith((INIT, C10D))]
    wait = row_wait(meetings[-1]) if meetings else None
    if wait and wait.kind == "init":
        wait.world = max(0, number(within, "world_size"))
    # The first that is known: a line (of torch's files, only that of the optimizer has a source), a signal, a function.
    if still and not wait:
        found = [line_wait(frame) for frame in lines] + [signal(within)] + [row_wait(frame) for frame in within]
        wait = next(filter(None, found), None)
    if not wait:
        does = "computes" if ran else "sleeps" if "sleep(" in place.text else "runs, or waits for something outside"
        wait = Wait(what=f"it {does}")
    return place, wait


def row_wait(frame):
    """Return what a thread waits for in a function of Python or torch, or None."""
    rows = [one for one in OF_PYTHON_AND_TORCH if frame.path.endswith(one.where)]
    rows = [one for one in rows if one.functions == "*" or frame.function in one.functions.split()]
    return rows[0].wait_of(frame) if rows and frame.library else None


def line_wait(frame):
    """Return what a line waits for in C code, or None if nothing is known, or not for which of several."""
    found = [
        Wait("lock", locks=block.locks) for block in frame.blocks if block.enters and all(map(is_lock, block.locks))
    ]
    for one in frame.waits:
        kind = one.things[0].type if one.things else ""
        rows = [row for row in OF_C if one.method in row.functions.split()]
        rows = [row for row in rows if (kind or "?") in row.where.split()]
        found += [row.wait_of(one) if one.alone else None for row in rows]
    return found[0] if len(found) == 1 else None


def is_lock(thing):
    """Return whether this is a lock, or may be one: `locks[name]`, but not `open(path)`."""
    return thing.type in facts.LOCKS or not (thing.type or thing.text.startswith("open("))


def signal(within):
    """Return the wait of a thread that stands in threading.py, queue.py or concurrent/futures, or None.

    The outermost class is the one that the program uses. Any of the functions may have a time limit.
    """
    frames = itertools.takewhile(lambda one: one.path.endswith(SIGNALS) and one.function not in ENTRY, within)
    wait = None
    for frame in frames:
        this, limit = frame.names.get("self"), frame.names.get("timeout")
        wait = wait or Wait("signal", "the end of its threads")  # of threading._shutdown(), which has no `self`
        wait.what = this.type if this and this.type else wait.what
        wait.timed |= bool(limit and limit.type != "NoneType" and limit.value != -1)
        if frame.function in ("join", "_wait_for_tstate_lock"):
            wait.joins = this.value if this else None
    return wait


def does(frames):
    """Return what a thread is within, with its rank there if it tells."""
    return {
        frame.function: number(frames[: at + 1], "rank")
        for at, frame in enumerate(frames)
        if frame.path.endswith((API, INIT, C10D)) and frame.function in (*MEETINGS, "shutdown")
    }


def number(frames, variable):
    """Return a number that torch's functions have as a variable, -1 if it is not known.

    The function that the program calls has it, or one within, if it stands in the environment.
    """
    values = [frame.value(variable, -1) for frame in reversed(frames)]
    return next((value for value in values if value >= 0), -1)


def held(frames):
    """Return the locks in whose `with` blocks a thread stands. The innermost come first."""
    found = []
    for frame in frames:
        for block in reversed(frame.blocks):
            if block.inside:
                place = f"{os.path.basename(frame.path)}:{block.line}"
                found += [replace(lock, place=place) for lock in block.locks]
    return found
