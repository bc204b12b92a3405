"""`--trace FILE`: record every RPC of this process, at the caller and at the callee.

Runs in every process of a job whose rank 0 was given --trace. Functions of torch are replaced only in such a job,
because torch has no public way to see every call that a process makes or serves, and to add a number to it.

The recording consists of bars. A bar is a period of time on one thread: a call, from its start until its answer; the
serving of a call; a wait; a step. Each call sends its number along, so that timeline.py can match the caller's bar
with the callee's.
"""

import collections
import contextlib
import itertools
import socket
import sys
import threading
import time

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed.rpc import api, internal

from glue import UserError

NUMBER = "number of this call in the trace"  # no program has a keyword argument of this name
MOST_BARS = 200_000  # of all ranks together; with the events for the arrows, less than a million events in a file

_recorder = None  # the Recorder of this process, while the job is recorded


def start(rank, names):
    """Begin to record every RPC of this rank. `names`: the worker names of all ranks. Called before init_rpc.

    Raises UserError if this version of torch cannot be recorded.
    """
    global _recorder
    _recorder = Recorder(rank, names)
    _recorder.replace_functions()


@contextlib.contextmanager
def bar(kind, name):
    """If the job is recorded, record the block as a bar of this thread. `kind`: "step", "work" or "wait"."""
    begun = _recorder and _recorder.begin(kind, name)
    try:
        yield
    finally:
        if begun:
            _end(begun)


def hand_in():
    """Stop recording, and return this rank's recording; None if there is none, or if it was handed in."""
    global _recorder
    recorder, _recorder = _recorder, None
    return recorder and recorder.recording()


class Recorder:
    """Records the bars of one process, as events of Chrome's trace format, but with times in nanoseconds.

    "tid" is the thread in which the bar was recorded.
    """

    def __init__(self, rank, names):
        self.rank, self.names = rank, names
        self.bars = collections.deque(maxlen=MOST_BARS // len(names))  # when it is full, the oldest bars are dropped
        self.numbers = itertools.count(rank << 40)
        # A call passes through several of the functions below, all on the thread that makes it. They exchange these
        # attributes: `call`, its (kind, callee's rank); `sent`, its bar; and `awaited`, the bar of a call for whose
        # answer this thread waits next.
        self.thread = threading.local()

    def begin(self, kind, name, **args):
        """Begin a bar on the current thread, and return it."""
        begun = {"ph": "X", "pid": self.rank, "tid": threading.get_ident(), "cat": kind, "name": name, "args": args}
        begun["ts"] = time.time_ns()
        self.bars.append(begun)
        return begun

    def replace_functions(self):
        """Put a function of ours around those of torch that every call and every wait pass through.

        All have private names. If a later torch lacks one, only --trace fails.
        """
        around = (
            # A call that is made first enters torch's profiler, which has its kind and the worker that is called. Then
            # its function and arguments are packed, together with its number, and the message is sent.
            (api, "_enable_rpc_profiler", self._note_call),
            (api, "PythonUDF", self._number_call),
            (api, "_invoke_rpc_python_udf", self._send_call),
            (api, "_invoke_remote_python_udf", self._send_call),
            # A call that is served enters this function, which init_rpc looks up once.
            (internal, "_run_function", self._serve_call),
            (torch._C.Future, "wait", self._wait),
        )
        if missing := [f"{owner.__name__}.{name}" for owner, name, _ in around if not hasattr(owner, name)]:
            raise UserError(f"--trace does not work with torch {torch.__version__}, which has no {', '.join(missing)}")
        for owner, name, ours in around:
            setattr(owner, name, _around(ours, getattr(owner, name)))
        dist_autograd.backward = bar("work", "backward")(dist_autograd.backward)
        if optim := sys.modules.get("torch.distributed.optim"):  # not imported if unused: that takes a second
            optim.DistributedOptimizer.step = bar("work", "optimizer step")(optim.DistributedOptimizer.step)

    def _note_call(self, plain, should_profile, qualified_name, func, rpc_type, worker):
        self.thread.call = rpc_type.value, worker.id
        return plain(should_profile, qualified_name, func, rpc_type, worker)

    def _number_call(self, plain, func, args, kwargs):
        kind, callee = self.thread.call
        number = next(self.numbers)
        self.thread.sent = self.begin(kind, _name(func, args), call=number, to=self.names[callee])
        return plain(func, args, {**kwargs, NUMBER: number})

    def _send_call(self, plain, *message):
        answer = plain(*message)
        begun = self.thread.sent
        if begun["cat"] == "sync":
            self.thread.awaited = begun  # this bar ends when the wait that follows ends
            return answer
        future = answer._get_future() if begun["cat"] == "remote" else answer  # remote() returns an RRef
        future.add_done_callback(lambda _: _end(begun))
        return answer

    def _serve_call(self, plain, call):
        number = getattr(call, "kwargs", {}).pop(NUMBER, None)
        if number is None:
            return plain(call)
        begun = self.begin("run", _name(call.func, call.args), call=number)
        result = plain(call)
        _end(begun)
        if isinstance(result, torch._C.Future):  # async_execution: the answer leaves when this Future is completed
            held = self.begin("held", begun["name"], call=number)
            result.add_done_callback(lambda _: _end(held))
        return result

    def _wait(self, plain, future):
        awaited = vars(self.thread).pop("awaited", None)
        if awaited is None and future.done():
            return plain(future)
        begun = awaited or self.begin("wait", "wait")
        try:
            return plain(future)
        finally:
            _end(begun)

    def recording(self):
        """Return the recording, as a dict for JSON."""
        bars = [dict(each) for each in list(self.bars)]
        now = time.time_ns()  # the same end for all open bars, so that nested bars stay nested
        for each in bars:
            if "dur" not in each:
                each |= {"dur": now - each["ts"], "name": f"{each['name']} (unfinished)", "args": {}}
        main = threading.main_thread().ident
        return {"host": socket.gethostname(), "main": main, "full": len(bars) == self.bars.maxlen, "bars": bars}


def _around(ours, plain):
    return lambda *args: ours(plain, *args)  # a function, which also works as a method


def _end(begun):
    begun["dur"] = time.time_ns() - begun["ts"]


def _name(func, args):
    """Return the name of the function or method that a call runs, instead of the helper of torch that runs it."""
    name = getattr(func, "__name__", str(func))
    module = getattr(func, "__module__", None) or ""
    if name.startswith("_local_invoke"):  # rref.rpc_sync().method(...) is _local_invoke(rref, "method", ...)
        return args[1]
    return f"torch.{module.split('.')[2]}.{name}" if module.startswith("torch.distributed.") else name
