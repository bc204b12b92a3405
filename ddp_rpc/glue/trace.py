"""For `--trace FILE` every RPC of this process is recorded here, on both sides of the wire.

Runs in every process.  What is recorded are bars: a call, from here until its answer; a call that was served here; a
wait; a step.  A call's number travels with it, so that timeline.py can join the caller's bar and the callee's.
"""

import collections
import contextlib
import functools
import itertools
import json
import queue
import socket
import sys
import threading
import time
import types
import zlib

import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed.rpc import api, internal

from glue import calls, timeline

NUMBER = "number of this call in the trace"  # no program has a keyword argument of this name
MOST_BARS = 200_000  # of all ranks together, with two ends of arrows for each: less than a million events in a file
_bars = None  # while recording: Chrome's trace events, but times in ns, and "tid" the thread
_rank, _thread = None, threading.local()  # of the thread: what the steps of one call hand on to each other


def start(job):
    """From here on record this rank's bars, if rank 0 was given a --trace.  After calls.watch, before init_rpc."""
    global _bars, _rank
    if job.rank == 0:
        job.main_store.set("trace/wanted", job.args.trace or "")
    if not job.main_store.get("trace/wanted"):
        return
    _bars, _rank = collections.deque(maxlen=MOST_BARS // job.world_size), job.rank  # the last ones are kept
    numbers, names = itertools.count(job.rank << 40), [job.worker_name(r, job.args) for r in range(job.world_size)]
    plain_udf, plain_run, plain_wait = api.PythonUDF, internal._run_function, torch._C.Future.wait

    def udf(func, args, kwargs):  # what is about to be pickled and sent
        kind, worker = calls.this_thread.call
        number = next(numbers)
        _thread.sent = _begin(kind, _name(func, args), call=number, to=names[worker])
        return plain_udf(func, args, {**kwargs, NUMBER: number})

    def send(plain, *message):
        answer, bar = plain(*message), _thread.sent  # a Future, or what remote() returns: an RRef
        if bar["cat"] == "sync":
            _thread.awaited = bar
        else:
            future = answer._get_future() if bar["cat"] == "remote" else answer
            future.add_done_callback(lambda _: _end(bar))
        return answer

    def wait(future):
        awaited = vars(_thread).pop("awaited", None)
        if future.done() and not awaited:
            return plain_wait(future)
        with bar("wait", "wait", awaited):
            return plain_wait(future)

    def run(call):
        number = getattr(call, "kwargs", {}).pop(NUMBER, None)
        if number is None:
            return plain_run(call)
        bar = _begin("run", _name(call.func, call.args), call=number)
        result = plain_run(call)
        _end(bar)
        if isinstance(result, torch._C.Future):  # of async_execution: the answer leaves when somebody completes it
            held = _begin("held", bar["name"], call=number)
            result.add_done_callback(lambda _: _end(held))
        return result

    api.PythonUDF, internal._run_function, torch._C.Future.wait = udf, run, wait
    for name in ("_invoke_rpc_python_udf", "_invoke_remote_python_udf"):
        setattr(api, name, functools.partial(send, getattr(api, name)))
    dist_autograd.backward = bar("work", "backward")(dist_autograd.backward)
    if optim := sys.modules.get("torch.distributed.optim"):  # only where it is used
        optim.DistributedOptimizer.step = bar("work", "optimizer step")(optim.DistributedOptimizer.step)
    get = bar("wait", "wait")(queue.SimpleQueue.get)
    queue.SimpleQueue = type("SimpleQueue", (queue.SimpleQueue,), {"get": get})


@contextlib.contextmanager
def bar(kind, name, begun=None):
    """Record the block as a bar of this thread, if this job is recorded: a "step", "work" or "wait"."""
    begun = begun or (_begin(kind, name) if _bars is not None else {"ts": 0})
    try:
        yield
    finally:
        _end(begun)


def _begin(kind, name, **args):
    begun = {"ph": "X", "pid": _rank, "tid": threading.get_ident(), "cat": kind, "name": name, "args": args}
    begun["ts"] = time.time_ns()
    _bars.append(begun)
    return begun


def _end(begun):
    begun["dur"] = time.time_ns() - begun["ts"]


def _name(func, args):
    """Return the name of what a call runs: the method, say, not the helper of torch or the program that is sent it."""
    name, module = getattr(func, "__name__", str(func)), getattr(func, "__module__", None) or ""
    if name.startswith("_local_invoke"):  # rref.rpc_sync().method(...) is _local_invoke(rref, "method", ...)
        return args[1]
    if args and isinstance(args[0], types.FunctionType):
        return args[0].__name__
    return f"torch.{module.split('.')[2]}.{name}" if module.startswith("torch.distributed.") else name


# --------------------------------------------------------------------------------------------------------- handing in


def hand_in(job, store, end=None):
    """Put what this rank has recorded into the store; rank 0 collects it, unless a starting process will.

    `end`: the End of a job whose work is not done.
    """
    global _bars
    if _bars is None:
        return
    bars, _bars, full = [dict(bar) for bar in list(_bars)], collections.deque(maxlen=0), len(_bars) == _bars.maxlen
    now = time.time_ns()  # one end for all that other threads are still in: these bars lie one in the other
    for bar in bars:
        if "dur" not in bar:
            bar |= {"dur": now - bar["ts"], "name": f"{bar['name']} (unfinished)", "args": {}}
    part = {"host": socket.gethostname(), "main": threading.main_thread().ident, "full": full, "bars": bars}
    store.set(f"trace/{job.rank}", zlib.compress(json.dumps(part).encode(), 1))
    if job.rank == 0 and not job.spawned:
        timeline.collect(job.args, store, job.worker_name, end, patience=3 if end else 60)
