"""The table of all waits that are recognised: what a stack shows, and what follows from it.

A thread waits in a frame of Python's or torch's own files, or in C code that a line of the program calls. For each row,
`needs` says who can end the wait, `sure` how sure that is, and `test` which test shows it. What has no row counts as
running, or as waiting for something outside of the program: then nothing is claimed about it.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from rpctrace.evidence import SHORT, Call, Place, Seen, Wait

ALARM = SHORT  # seconds: after a longer time, nobody waits for an alarm
LOCKS = ("lock", "RLock", "Condition")
SIGNALS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")  # in which threads wait for each other
ENTRY = ("start", "run", "_bootstrap", "_bootstrap_inner")  # of Thread: they do not wait for its end
API, C10D, FUTURES = "/distributed/rpc/api.py", "/distributed/distributed_c10d.py", "/torch/futures/__init__.py"
NOBODY = ("tqdm/_monitor.py", "rpctrace_standing.py")  # files of threads that wake nobody
BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
MEETINGS = ("shutdown", "init_rpc", "init_process_group", "new_group")  # whatever they wait for within, it is all ranks
OPTIMIZER = "torch.optim._local_optimizer_step"


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
    read: object  # returns the Wait, given the frame and, for C code, the fact
    needs: str
    sure: str
    test: str


def call(frame):
    made = Call(frame.value("to"), frame.value("func"), limit=frame.value("timeout") or 0.0)
    made.rref, made.inner, made.owes = (frame.value(name) or "" for name in ("rref", "inner", "owes"))
    return Wait("answer", answers=[[made]])


def future(frame, fact=None):
    return Wait("answer")


def optimizer(frame):
    return Wait("answer", answers=[[Call(None, OPTIMIZER)]])


def shutdown(frame):
    graceful = "graceful" not in frame.names or frame.value("graceful") is not False
    return Wait("shutdown", limit=frame.value("timeout") or 0.0, timed=not graceful)


def begin_to_meet(frame):
    rank, world = (frame.value(name) for name in ("rank", "world_size"))
    known = {"rank": rank if isinstance(rank, int) else -1, "world": world if isinstance(world, int) else 0}
    return Wait("init", frame.function, **known)


def new_group(frame):
    return Wait(what="the other ranks to make a new group")


def collective(frame):
    if "group" not in frame.names:
        return None
    return Wait("collective", frame.function, group=str(frame.value("group") or ""))


def engine(frame):
    return Wait("engine")


def queue_of_an_executor(frame):
    return Wait("signal", "a ThreadPoolExecutor's queue")


def program(frame):
    return Wait(what="it waits for another program")


def connection(frame):
    return Wait(what="it waits for a connection or a file")


def acquire(frame, fact):
    return Wait("lock", locks=[Seen(**fact["things"][0])], timed=fact["limited"])


def simple_queue(frame, fact):
    return Wait("signal", "SimpleQueue", timed=fact["limited"])


def work(frame, fact):
    return Wait("work")


def key_in_a_store(frame, fact):
    return Wait(what="a key in a store, with a time limit")


def value(frame, fact):
    thing = fact["things"][0]
    owner, _, number = str(thing.get("value") or "").partition(" ")
    return Wait("rref", answers=[[Call(owner or None, None, rref=number)]])


def backward(frame, fact):
    return Wait("backward")


OF_PYTHON_AND_TORCH = (
    Row(
        API, "rpc_sync", call, "the thread that serves it", "certain by name; by function if one serves it", "two_locks"
    ),
    Row(FUTURES, "wait", future, "what completes it, if the lines tell", "as sure as the lines", "later_answer"),
    Row(FUTURES, "wait_all", future, "all of them", "as sure as the lines", "no_free_thread"),
    Row("/distributed/optim/optimizer.py", "_wait_for_all", optimizer, "each owner", "by function", "optimizer_step"),
    Row(API, "shutdown", shutdown, "every worker to call it", "certain, if all are known", "killed"),
    Row("/distributed/rpc/__init__.py", "init_rpc", begin_to_meet, "every rank", "certain", "late_rank"),
    Row(C10D, "init_process_group", begin_to_meet, "every rank", "certain, if ranks are given", "late_rank"),
    Row(C10D, "new_group _new_group_with_tag split_group", new_group, "the others", "it is an end", "none"),
    Row(
        C10D, "*", collective, "the members that have not begun it", "certain, if all are known", "call_and_collective"
    ),
    Row("/torch/autograd/graph.py", "_engine_run_backward", engine, "DDP's collectives", "in a recording", "none"),
    Row("/concurrent/futures/thread.py", "_worker", queue_of_an_executor, "any thread", "one of many", "executor"),
    Row("/subprocess.py", "*", program, "another program", "it is alive", "another program"),
    Row("/selectors.py", "*", connection, "something outside", "it is alive", "none"),
    # threading.py, queue.py and concurrent/futures: signal(), below. Any thread of the process, or the one that joins.
)
OF_C = (
    Row("lock", "acquire", acquire, "who stands in a `with` of it", "certain, of the same object", "two_locks"),
    Row("RLock", "acquire", acquire, "its owner, or as above", "certain", "constructor"),
    Row("Condition", "acquire", acquire, "as above; not who waits for its signal", "certain", "too_few"),
    Row("SimpleQueue", "get", simple_queue, "any thread of the process", "one of many", "simple_queue"),
    Row("Work", "wait", work, "a collective, or a message", "it is an end", "none"),
    Row("Store", "get wait add", key_in_a_store, "a key", "it has a time limit", "none"),
    Row("PyRRef", "to_here", value, "what makes the value, at its owner", "by function", "constructor"),
    Row("Future", "wait", future, "what completes it, if the lines tell", "as sure as the lines", "later_answer"),
    Row("", "backward", backward, "hooks, and full or lost processes", "probable", "backward_hook"),
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
            return row.read(frame) or inner
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
        found += [row.read(frame, fact) for row in rows[:1]]
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
