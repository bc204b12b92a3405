"""The table of all waits that are recognised: what a stack shows, and what follows from it.

A thread waits in a frame of Python's or torch's own files, or in C code that a line of the program calls. What has no
row counts as running, or as waiting for something outside: a sleep, input(), select, a socket, another program. Such a
thread is alive, and nothing is claimed about it.
"""

import os
from dataclasses import replace
from typing import NamedTuple

from rpctrace import syntax
from rpctrace.evidence import Call, Frame, Seen, Wait

SIGNALS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")  # in which threads wait for each other
ENTRY = ("start", "run", "_bootstrap", "_bootstrap_inner")  # of Thread: they do not wait for its end
API, C10D, FUTURES = "/distributed/rpc/api.py", "/distributed/distributed_c10d.py", "/torch/futures/__init__.py"
INIT, OPTIMIZER, GRAPH = "/distributed/rpc/__init__.py", "/distributed/optim/optimizer.py", "/torch/autograd/graph.py"
EXECUTOR = "/concurrent/futures/thread.py"
NOBODY = "tqdm/_monitor.py"  # the file of a thread that wakes nobody
OF_ALL = ("all_", "barrier", "reduce_scatter")  # so begin the collectives that nobody ends before all have begun
MEETINGS = ("_wait_all_workers", "init_rpc", "init_process_group", "new_group")  # in which all ranks come together


class Row(NamedTuple):
    file: str  # the end of its name; for C code, the class whose method is called, and "?" if it may be unknown
    functions: str  # separated by blanks, "*" for all
    wait: object  # the Wait, or a function that returns it: of the frame, or for C code of the Fact

    def wait_of(self, seen):
        return self.wait(seen) if callable(self.wait) else replace(self.wait)


def shutdown(frame):
    return Wait("shutdown", timed=bool(frame.value("timeout", 0.0)))


def begin_to_meet(frame):
    return Wait("init", frame.function, world=frame.value("world_size", 0))


def collective(frame):
    return Wait("collective", frame.function) if "group" in frame.names else None


def acquire(fact):
    return Wait("lock", locks=fact.things, timed=fact.limited)


def simple_queue(fact):
    return Wait("signal", "SimpleQueue", timed=fact.limited)


def end(what):
    """Return a wait of which it is not known who ends it: it can only be the end of a chain."""
    return Wait(what=what)


ANSWER, STEP = Wait("answer"), Call(None, "torch.optim._local_optimizer_step")
OF_PYTHON_AND_TORCH = (
    Row(API, "rpc_sync", ANSWER),
    Row(FUTURES, "wait wait_all", ANSWER),
    Row(OPTIMIZER, "_wait_for_all", Wait("answer", calls=[STEP])),
    Row(API, "_wait_all_workers", shutdown),
    Row(API, "shutdown", end("calls that are not answered")),
    Row(INIT, "init_rpc", begin_to_meet),
    Row(C10D, "init_process_group", begin_to_meet),
    Row(C10D, "new_group _new_group_with_tag split_group", end("the members of a new group")),
    Row(C10D, "*", collective),
    Row(GRAPH, "_engine_run_backward", end("a backward pass")),
    Row(EXECUTOR, "_worker", Wait("signal", "the queue of an executor")),
    # signal() reads threading.py, queue.py and concurrent/futures: Condition, Event, Queue, Thread.join and so on.
)
OF_C = (
    Row("lock RLock Condition", "acquire", acquire),
    Row("SimpleQueue", "get", simple_queue),
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
    place, wait, signals = Frame(), None, True
    for frame in frames:
        signals = signals and frame.path.endswith(SIGNALS)
        meets = frame.path.endswith((INIT, C10D)) and frame.function in MEETINGS  # it asks again and again
        if still or meets:
            wait = wait_in(frame, wait, signals)
        if not frame.library:
            place = frame
            break
    if not wait or (ran and wait.kind in ("lock", "answer")):
        does = "computes" if ran else "sleeps" if "sleep(" in place.text else "runs, or waits for something outside"
        wait = Wait(what=f"it {does}")
    return place, wait


def wait_in(frame, inner, signals):
    """Return what a thread waits for, as this frame tells it. `inner` is what the frames within it have told."""
    if not frame.library:  # lock.acquire(), in C; or `with condition:`, around Condition.__enter__, which tells less
        return (own_wait(frame) or inner) if not inner or inner.enters else inner
    if signals and frame.function not in ENTRY:  # Condition.wait, within Event.wait: the thread waits for an Event
        return signal(frame, inner)
    if inner and frame.function not in MEETINGS:  # rpc_sync, around Future.wait
        return inner
    # all_reduce, around C code; or init_rpc, around the wait for a store, which is one of its steps
    rows = [one for one in OF_PYTHON_AND_TORCH if frame.path.endswith(one.file)]
    rows = [one for one in rows if one.functions == "*" or frame.function in one.functions.split()]
    return (rows and rows[0].wait_of(frame)) or own_wait(frame) or inner


def own_wait(frame):
    """Return what a line of the program itself waits for, or None if it is not known for which of several."""
    found = []
    for fact in frame.facts:
        if fact.method:
            kind = fact.things[0].type if fact.things else ""
            rows = [row for row in OF_C if fact.method in row.functions.split()]
            found += [row.wait_of(fact) for row in rows if (kind or "?") in row.file.split()]
        elif fact.enters and all(lock.type in syntax.LOCKS for lock in fact.things):
            found.append(Wait("lock", locks=fact.things))
    return found[0] if len(found) == 1 else None


def signal(frame, inner):
    """A thread waits in threading.py or queue.py: the outermost class is the one that the program uses."""
    this, limit = frame.names.get("self", Seen("self")), frame.names.get("timeout")
    found = inner or Wait("signal", locks=[this], enters=frame.function == "__enter__")
    found.what = this.type or found.what
    found.timed |= bool(limit and limit.type != "NoneType" and limit.value != -1)
    if frame.function in ("join", "_wait_for_tstate_lock"):
        found.joins = this.value
    return found


def does(frames):
    """Return what a thread is within, with its rank there if it tells."""
    found = [frame for frame in frames if frame.path.endswith((API, INIT, C10D))]
    return {one.function: one.value("rank", -1) for one in found if one.function in (*MEETINGS, "shutdown")}


def held(frames):
    """Return the locks in whose `with` blocks a thread stands. The innermost come first."""
    found = []
    for frame in frames:
        for fact in frame.facts:
            if fact.inside:
                place = f"{os.path.basename(frame.path)}:{fact.line}"
                found += [replace(lock, place=place) for lock in fact.things]
    return found
