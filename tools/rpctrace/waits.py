"""The table of all waits that are recognised: what a stack shows, and what follows from it.

A thread waits in a frame of Python's or torch's own files, or in C code that a line of the program calls. What has no
row counts as running, or as waiting for something outside: a sleep, input(), select, a socket, another program. Such a
thread is alive, and nothing is claimed about it.
"""

from dataclasses import replace
from typing import NamedTuple

from rpctrace.evidence import Call, Frame, Seen, Wait

LOCKS = ("lock", "RLock", "Condition")
SIGNALS = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")  # in which threads wait for each other
ENTRY = ("start", "run", "_bootstrap", "_bootstrap_inner")  # of Thread: they do not wait for its end
API, C10D, FUTURES = "/distributed/rpc/api.py", "/distributed/distributed_c10d.py", "/torch/futures/__init__.py"
INIT, OPTIMIZER, GRAPH = "/distributed/rpc/__init__.py", "/distributed/optim/optimizer.py", "/torch/autograd/graph.py"
EXECUTOR = "/concurrent/futures/thread.py"
NOBODY = ("tqdm/_monitor.py", "rpctrace_standing.py")  # files of threads that wake nobody
BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
MEETINGS = ("_wait_all_workers", "init_rpc", "init_process_group", "new_group")  # in which all ranks come together


class Row(NamedTuple):
    file: str  # the end of its name; for C code, the end of the class whose method is called
    functions: str  # separated by blanks, "*" for all
    wait: object  # the Wait, or a function of the frame (and, for C code, of the fact) that returns it

    def is_for(self, name, function):
        return name.endswith(self.file) and (self.functions == "*" or function in self.functions.split())

    def wait_of(self, *frame_and_fact):
        return self.wait(*frame_and_fact) if callable(self.wait) else replace(self.wait)


def shutdown(frame):
    return Wait("shutdown", limit=frame.value("timeout", 0.0))


def begin_to_meet(frame):
    return Wait("init", frame.function, world=frame.value("world_size", 0))


def collective(frame):
    return Wait("collective", frame.function, group=frame.value("group", "")) if "group" in frame.names else None


def acquire(frame, fact):
    return Wait("lock", locks=[Seen(**fact["things"][0])], timed=fact["limited"])


def simple_queue(frame, fact):
    return Wait("signal", "SimpleQueue", timed=fact["limited"])


def end(what):
    """Return a wait of which it is not known who ends it: it can only be the end of a chain."""
    return Wait(what=what)


ANSWER, RREF, STEP = Wait("answer"), Wait("rref"), Call(None, "torch.optim._local_optimizer_step")
OF_PYTHON_AND_TORCH = (
    Row(API, "rpc_sync", ANSWER),
    Row(FUTURES, "wait wait_all", ANSWER),
    Row(OPTIMIZER, "_wait_for_all", Wait("answer", answers=[[STEP]])),
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
    Row("lock", "acquire", acquire),
    Row("RLock", "acquire", acquire),
    Row("Condition", "acquire", acquire),
    Row("SimpleQueue", "get", simple_queue),
    Row("Work", "wait", end("a collective, or a message")),
    Row("Store", "get wait add", end("a key in a store, with a time limit")),
    Row("PyRRef", "to_here", RREF),
    Row("PyRRef", "local_value", end("the value of an RRef")),
    Row("Future", "wait", ANSWER),
    Row("", "backward", Wait("backward")),
)


def read(frames, still, ran):
    """Return the innermost line of the program in a stack, and what the thread waits for there.

    `still`: it has not moved; `ran`: it has used the CPU.
    """
    place, wait, signals = Frame(), None, True
    for frame in frames:
        signals = signals and frame.path.endswith(SIGNALS)
        if still:
            wait = wait_in(frame, wait, signals)
        elif frame.library and frame.function in ("init_rpc", "init_process_group"):  # it asks again and again
            wait = end(f"the other ranks, in {frame.function}")
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
        wait = (own_wait(frame) or inner) if not inner or inner.enters else inner
    elif signals and frame.function not in ENTRY:  # Condition.wait, within Event.wait: the thread waits for an Event
        wait = signal(frame, inner)
    elif inner and frame.function not in MEETINGS:  # rpc_sync, around Future.wait
        wait = inner
    else:  # all_reduce, around C code; or init_rpc, around the wait for a store, which is one of its steps
        rows = [row for row in OF_PYTHON_AND_TORCH if row.is_for(frame.path, frame.function)]
        wait = (rows and rows[0].wait_of(frame)) or own_wait(frame) or inner
    if frame.answers and wait and wait.kind in ("answer", "rref") and not wait.answers:
        wait.answers = [[Call(**call) for call in frame.answers]]
    return wait


def own_wait(frame):
    """Return what a line of the program itself waits for, or None if it is not known for which of several."""
    found = []
    for fact in frame.facts:
        if "block" in fact:
            locks = [Seen(**thing) for thing in fact["things"] if thing.get("type") in LOCKS]
            if fact["enters"] and locks and len(locks) == len(fact["things"]):
                found.append(Wait("lock", locks=locks))
        else:
            kind = fact["things"][0].get("type", "") if fact["things"] else ""
            found += [row.wait_of(frame, fact) for row in OF_C if row.is_for(kind, fact["method"])][:1]
    return found[0] if len(found) == 1 else None


def signal(frame, inner):
    """A thread waits in threading.py or queue.py: the outermost class is the one that the program uses."""
    this, limit = frame.names.get("self", Seen("self")), frame.names.get("timeout")
    found = inner or Wait("signal", locks=[this], enters=frame.function == "__enter__")
    found.what = this.type or found.what
    found.timed |= bool(limit and limit.type != "NoneType" and limit.value != -1)
    found.again |= "_acquire_restore" in frame.function + frame.text
    if frame.function in ("join", "_wait_for_tstate_lock"):
        found.joins = this.value
    return found


def does(frames):
    """Return what a thread is within, with its rank there if it tells."""
    found = [frame for frame in frames if frame.path.endswith((API, INIT, C10D))]
    return {one.function: one.value("rank", -1) for one in found if one.function in (*MEETINGS, "shutdown")}


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
