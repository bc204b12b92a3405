"""For `--trace FILE` every RPC of this process is counted, and recorded on both sides of the wire.

Runs in every process of a job whose rank 0 was given --trace.  There, and only there, functions of torch are replaced:
torch has no public way to see every call that a process makes and serves, and to send a number along with it.

What is recorded are bars: a call, from here until its answer; a call that was served here; a wait; a step.  A call's
number travels with it, so that timeline.py can join the caller's bar and the callee's.
"""

import collections
import contextlib
import functools
import itertools
import json
import socket
import sys
import threading
import time
import types
import zlib

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed.rpc import api, internal

NUMBER = "number of this call in the trace"  # no program has a keyword argument of this name
MOST_BARS = 200_000  # of all ranks together, with two ends of arrows for each: less than a million events in a file

_recorder = None  # the Recorder of this process, if its job is recorded


def start(rank, names):
    """From here on record every RPC of this rank.  `names`: all workers' names.  Called before init_rpc."""
    global _recorder
    _recorder = Recorder(rank, names)
    _recorder.count_calls_made()
    _recorder.number_calls_made()
    _recorder.watch_calls_served()
    _recorder.watch_waits_and_work()


def is_recording():
    """Return whether this job is recorded."""
    return _recorder is not None


def calls_so_far():
    """Return how many RPCs this process has made, and served for others: 0 where they are not counted.

    torch's own are left out (of which type is this RRef?), and so are built-in operators served, which C++ runs.
    """
    return _recorder.calls if _recorder else 0


@contextlib.contextmanager
def bar(kind, name):
    """Record the block as a bar of this thread, a "step", "work" or "wait", if this job is recorded."""
    if _recorder is None:
        yield
        return
    begun = _recorder.begin(kind, name)
    try:
        yield
    finally:
        _end(begun)


def hand_in(store):
    """Put what this rank has recorded into the store.  What happens afterwards is not recorded."""
    if _recorder is not None and not _recorder.closed:
        _recorder.closed = True
        store.set(f"trace/{_recorder.rank}", _recorder.packed())


class Recorder:
    """The bars of one process: Chrome's trace events, but times in ns, and "tid" is the thread."""

    def __init__(self, rank, names):
        self.rank, self.names = rank, names
        self.bars = collections.deque(maxlen=MOST_BARS // len(names))  # the last ones are kept
        self.numbers = itertools.count(rank << 40)
        self.calls = 0
        self.lock = threading.Lock()  # guards `calls`
        self.closed = False
        # What the steps of one call hand on to each other, in the thread that makes it: `call`, its (kind, callee's
        # rank); `sent`, its bar; and `awaited`, the bar of a call for whose answer the thread waits next.
        self.thread = threading.local()

    def begin(self, kind, name, **args):
        """Begin a bar of this thread; return it."""
        begun = {"ph": "X", "pid": self.rank, "tid": threading.get_ident(), "cat": kind, "name": name, "args": args}
        begun["ts"] = time.time_ns()
        if not self.closed:
            self.bars.append(begun)
        return begun

    def count(self, func):
        """Count a call of `func`, made or served, unless it is torch's own."""
        name = getattr(func, "__name__", "")
        module = getattr(func, "__module__", None) or ""
        if not module.startswith("torch.distributed.rpc") or name.startswith("_local_invoke"):
            with self.lock:
                self.calls += 1

    # ------------------------------------------------------------------------------------------------- calls made

    def count_calls_made(self):
        """Each call that is made passes torch's profiler first, which says of what kind it is, and to which worker."""
        api._enable_rpc_profiler = functools.partial(self._note_call, api._enable_rpc_profiler)

    def number_calls_made(self):
        """Then its function and arguments are packed, to which a number is added, and its message is sent."""
        api.PythonUDF = functools.partial(self._number_call, api.PythonUDF)
        for name in ("_invoke_rpc_python_udf", "_invoke_remote_python_udf"):
            setattr(api, name, functools.partial(self._send_call, getattr(api, name)))

    def _note_call(self, plain, should_profile, qualified_name, func, rpc_type, worker):
        if worker.id != self.rank:  # a call to itself is counted where it is served, which is here
            self.count(func)
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
            self.thread.awaited = begun  # it ends in the wait that follows
            return answer
        future = answer._get_future() if begun["cat"] == "remote" else answer  # remote() returns an RRef
        future.add_done_callback(lambda _: _end(begun))
        return answer

    # ----------------------------------------------------------------------------------------------- calls served

    def watch_calls_served(self):
        """Each call that is served passes here.  init_rpc looks this function up, once."""
        internal._run_function = functools.partial(self._serve_call, internal._run_function)

    def _serve_call(self, plain, call):
        self.count(getattr(call, "func", None))
        number = getattr(call, "kwargs", {}).pop(NUMBER, None)
        if number is None:
            return plain(call)
        begun = self.begin("run", _name(call.func, call.args), call=number)
        result = plain(call)
        _end(begun)
        if isinstance(result, torch._C.Future):  # of async_execution: the answer leaves when somebody completes it
            held = self.begin("held", begun["name"], call=number)
            result.add_done_callback(lambda _: _end(held))
        return result

    # --------------------------------------------------------------------------------------------- waits and work

    def watch_waits_and_work(self):
        """Each wait for a Future passes here, each backward pass, and each step of a DistributedOptimizer."""
        plain_wait = torch._C.Future.wait

        def wait(future):
            awaited = vars(self.thread).pop("awaited", None)
            if awaited is None and future.done():
                return plain_wait(future)
            begun = awaited or self.begin("wait", "wait")
            try:
                return plain_wait(future)
            finally:
                _end(begun)

        torch._C.Future.wait = wait
        dist_autograd.backward = bar("work", "backward")(dist_autograd.backward)
        if optim := sys.modules.get("torch.distributed.optim"):  # only where it is used: it takes a second to load
            optim.DistributedOptimizer.step = bar("work", "optimizer step")(optim.DistributedOptimizer.step)

    # ------------------------------------------------------------------------------------------------- handing in

    def packed(self):
        """Return all bars, as bytes for the store."""
        full = len(self.bars) == self.bars.maxlen
        bars = [dict(each) for each in list(self.bars)]
        now = time.time_ns()  # one end for all that other threads are still in: these bars lie one in the other
        for each in bars:
            if "dur" not in each:
                each |= {"dur": now - each["ts"], "name": f"{each['name']} (unfinished)", "args": {}}
        main = threading.main_thread().ident
        part = {"host": socket.gethostname(), "main": main, "full": full, "bars": bars}
        return zlib.compress(json.dumps(part).encode(), 1)


def _end(begun):
    begun["dur"] = time.time_ns() - begun["ts"]


def _name(func, args):
    """Return the name of what a call runs: the method, say, not the helper of torch that is sent it."""
    name = getattr(func, "__name__", str(func))
    module = getattr(func, "__module__", None) or ""
    if name.startswith("_local_invoke"):  # rref.rpc_sync().method(...) is _local_invoke(rref, "method", ...)
        return args[1]
    if args and isinstance(args[0], types.FunctionType):  # a helper that is sent the function to call
        return args[0].__name__
    return f"torch.{module.split('.')[2]}.{name}" if module.startswith("torch.distributed.") else name
