"""The table of all waits that are recognised: what a stack shows, and what follows from it.

A thread waits in a frame of Python's or torch's own files, or in C code that a line of the program calls. For each row,
`needs` says who can end the wait, `sure` how sure that is, and `test` which program of tests/tools shows it. What has
no row counts as running, or as waiting for something outside: a sleep, input(), select, a socket, another program. Such
a thread is alive, and nothing is claimed about it.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rpctrace.evidence import SHORT, Call, Place, Seen, Wait

ALARM = SHORT  # seconds: after a longer time, nobody waits for an alarm
LOCKS = ("lock", "RLock", "Condition")
SIGNALS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")  # in which threads wait for each other
ENTRY = ("start", "run", "_bootstrap", "_bootstrap_inner")  # of Thread: they do not wait for its end
API, C10D, FUTURES = "/distributed/rpc/api.py", "/distributed/distributed_c10d.py", "/torch/futures/__init__.py"
NOBODY = ("tqdm/_monitor.py", "rpctrace_standing.py")  # files of threads that wake nobody
BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
MEETINGS = (
    "_wait_all_workers",
    "init_rpc",
    "init_process_group",
    "new_group",
)  # whatever they wait for within, it is all ranks


@dataclass
class Frame:
    """A function on a stack. `names`: variables of a library's frame; `facts`: see record/rpctrace_syntax.py."""

    path: str
    function: str
    line: int
    library: bool
    text: str = ""
    names: dict[str, Seen] = field(default_factory=dict)
    facts: list[dict] = field(default_factory=list)

    def value(self, name):
        return self.names[name].value if name in self.names else None


class Row(NamedTuple):
    file: str  # the end of its name; for C code, the end of the class whose method is called
    functions: str  # separated by blanks, "*" for all
    wait: object  # the Wait, or a function of the frame (and, for C code, of the fact) that returns it
    needs: str
    sure: str
    test: str

    def wait_of(self, *frame_and_fact):
        return self.wait(*frame_and_fact) if callable(self.wait) else replace(self.wait)


def call(frame):
    made = Call(frame.value("to"), frame.value("func"), limit=frame.value("timeout") or 0.0)
    made.rref, made.inner = frame.value("rref") or "", frame.value("inner") or ""
    made.owes = bool(frame.value("owes"))
    return Wait("answer", answers=[[made]])


def shutdown(frame):
    return Wait("shutdown", limit=frame.value("timeout") or 0.0)


def begin_to_meet(frame):
    rank, world = (frame.value(name) for name in ("rank", "world_size"))
    known = {"rank": rank if isinstance(rank, int) else -1, "world": world if isinstance(world, int) else 0}
    return Wait("init", frame.function, **known)


def collective(frame):
    if "group" not in frame.names:
        return None
    return Wait("collective", frame.function, group=str(frame.value("group") or ""))


def acquire(frame, fact):
    return Wait("lock", locks=[Seen(**fact["things"][0])], timed=fact["limited"])


def simple_queue(frame, fact):
    return Wait("signal", "SimpleQueue", timed=fact["limited"])


def value_of_rref(frame, fact):
    owner, _, number = str(fact["things"][0].get("value") or "").partition(" ")
    return Wait("rref", answers=[[Call(owner or None, None, rref=number)]])


FUTURE, STORE = Wait("answer"), Wait(what="a key in a store, with a time limit")
STEP = Wait("answer", answers=[[Call(None, "torch.optim._local_optimizer_step")]])
NEW_GROUP, EXECUTOR = Wait(what="the other ranks to make a new group"), Wait("signal", "a queue of an executor")
LINES, OPTIMIZER = "as sure as the lines", "/distributed/optim/optimizer.py"
OF_PYTHON_AND_TORCH = (
    Row(API, "rpc_sync", call, "who serves it", "certain, if one thread serves this function", "two_locks"),
    Row(FUTURES, "wait", FUTURE, "what completes it, if the lines tell", LINES, "observers"),
    Row(FUTURES, "wait_all", FUTURE, "one of those that are not complete", LINES, "no_free_thread"),
    Row(OPTIMIZER, "_wait_for_all", STEP, "the owners of the parameters", "by the function", "optimizer_step"),
    Row(API, "_wait_all_workers", shutdown, "every worker", "certain, if all are known", "killed"),
    Row(API, "shutdown", Wait(what="the end of shutdown"), "calls that are not answered", "it is an end", "none"),
    Row("/distributed/rpc/__init__.py", "init_rpc", begin_to_meet, "every rank", "certain", "none"),
    Row(C10D, "init_process_group", begin_to_meet, "every rank", "certain, if ranks are given", "queue_and_group"),
    Row(C10D, "new_group _new_group_with_tag split_group", NEW_GROUP, "the other ranks", "it is an end", "none"),
    Row(C10D, "*", collective, "who has not begun it", "certain, if all members are known", "call_and_collective"),
    Row("/torch/autograd/graph.py", "_engine_run_backward", Wait("engine"), "DDP", "in a recording", "train"),
    Row("/concurrent/futures/thread.py", "_worker", EXECUTOR, "any thread of the process", "one of many", "none"),
    # In threading.py, queue.py and concurrent/futures (Condition, Event, Semaphore, Barrier, Queue, Thread.join), see
    # signal(): it needs any other thread of the process, or the one that it joins. Programs: too_few, optimizer_step.
)
OF_C = (
    Row("lock", "acquire", acquire, "who stands in a `with` of it", "certain, of the same object", "two_locks"),
    Row("RLock", "acquire", acquire, "its owner, or the same", "certain", "observers"),
    Row("Condition", "acquire", acquire, "the same, but not who waits for its signal", "certain", "too_few"),
    Row("SimpleQueue", "get", simple_queue, "any thread of the process", "one of many", "queue_and_group"),
    Row("Work", "wait", Wait("work"), "a collective, or a message", "it is an end", "none"),
    Row("Store", "get wait add", STORE, "a key", "it has a time limit", "none"),
    Row("PyRRef", "to_here", value_of_rref, "what makes the value, at its owner", "by the function", "constructor"),
    Row("Future", "wait", FUTURE, "what completes it, if the lines tell", LINES, "none"),
    Row("", "backward", Wait("backward"), "hooks, and full or lost processes", "probable", "backward_hook"),
)


def read(frames, still, ran, trace=None):
    """Return the innermost line of the program in a stack, and what the thread waits for there.

    `still`: it has not moved; `ran`: it has used the CPU. `trace` finds the calls whose answers a line waits for.
    """
    place, wait, signals = Place(), None, True
    for number, frame in enumerate(frames):
        signals = signals and frame.path.endswith(SIGNALS)
        if still:
            wait = wait_in(frame, wait, signals)
        if not frame.library:
            place = Place(frame.path, frame.line, frame.function, frame.text)
            if wait and wait.kind in ("answer", "rref") and trace:
                trace(frames[number:], wait)
            break
    if not wait or (ran and wait.kind in ("lock", "work", "engine", "answer")):
        does = "computes" if ran else "sleeps" if "sleep(" in place.text else "runs, or waits for something outside"
        wait = Wait(what=f"it {does}")
    return place, wait


def wait_in(frame, inner, signals):
    """Return what a thread waits for, as this frame tells it. `inner` is what the frames within it have told."""
    if not frame.library:
        return (own_wait(frame) or inner) if not inner or inner.enters else inner
    if signals and frame.function not in ENTRY:
        return signal(frame, inner)
    if inner and frame.function not in MEETINGS:
        return inner
    for row in OF_PYTHON_AND_TORCH:
        if frame.path.endswith(row.file) and (row.functions == "*" or frame.function in row.functions.split()):
            return row.wait_of(frame) or inner
    return own_wait(frame) or inner


def own_wait(frame):
    """Return what a line of the program itself waits for, or None if it is not known for which of several."""
    found = []
    for fact in frame.facts:
        if "block" in fact:
            locks = [Seen(**thing) for thing in fact["things"] if thing.get("type") in LOCKS]
            if fact["enters"] and locks and len(locks) == len(fact["things"]):
                found.append(Wait("lock", locks=locks))
            continue
        kind = fact["things"][0].get("type", "") if fact["things"] else ""
        rows = [row for row in OF_C if kind.endswith(row.file) and fact["method"] in row.functions.split()]
        found += [row.wait_of(frame, fact) for row in rows[:1]]
    if len(found) > 1 and all(wait.kind == "rref" for wait in found):
        found = [Wait("rref", answers=[[call for wait in found for call in wait.answers[0]]])]
    return found[0] if len(found) == 1 else None


def signal(frame, inner):
    """A thread waits in threading.py or queue.py: the outermost class is the one that the program uses."""
    this, limit = frame.names.get("self", Seen("self")), frame.names.get("timeout")
    found = inner or Wait("signal", locks=[this], enters=frame.function == "__enter__")
    found.what = this.type or found.what
    found.timed |= bool(limit and not limit.is_none() and limit.value != -1)
    found.again |= "_acquire_restore" in frame.function + frame.text
    if frame.function in ("join", "_wait_for_tstate_lock"):
        found.joins = this.value
    return found


def is_nobody(frames):
    return any(frame.path.endswith(NOBODY) for frame in frames)


def held(frames):
    """Return the locks in whose `with` blocks a thread stands. The innermost come first."""
    found = []
    for frame in frames:
        for fact in frame.facts:
            if fact.get("inside"):
                place = f"{frame.path.rpartition('/')[2]}:{fact['block']}"
                found += [Seen(**thing, place=place) for thing in fact["things"]]
    return found
