"""Every RPC of this process passes here: counted always, and for `--trace FILE.json` noted on a time line.

Runs in every process.  The time line is for ui.perfetto.dev: one row per thread of a rank, one bar per RPC from the
call to its reply, as the caller saw it: rpc_sync and rpc_async until the answer is there, remote until it is sent.
"""

import contextlib
import json
import os
import threading
import time

from torch.distributed.rpc import api, internal

_lock = threading.Lock()
_counts = {"made": 0, "served": 0}
_note = None  # what `recorded` puts here is told of each call: (label, peer, start in ns, thread)


def rpc_calls():
    """Return {"made": RPCs that this process has sent, "served": those that it has run for others}, since its start.

    The program's own: what torch asks its peers for by itself (who is there, of which type is this RRef) is not in it,
    nor are built-in operators such as torch.add on the serving side, which run in C++ alone.
    """
    with _lock:
        return dict(_counts)


def watch_calls():
    """Let every RPC pass through this module from now on.  Before init_rpc, which looks up what serves them once."""
    plain_invoke, plain_profiler, plain_run = api._invoke_rpc, api._enable_rpc_profiler, internal._run_function

    def invoke(to, func, rpc_type, args=None, kwargs=None, timeout=api.UNSET_RPC_TIMEOUT):
        _count("made", func)
        note, started, thread = _note, time.time_ns(), threading.get_ident()
        future = plain_invoke(to, func, rpc_type, args, kwargs, timeout)
        if note:
            # rref.rpc_sync().method(...) is _local_invoke(rref, "method", ...): name the method, not the helper.
            method = args[1] if func.__name__.startswith("_local_invoke") else func.__name__
            label, peer = f"{rpc_type.value} {method}", getattr(to, "name", to)
            future.add_done_callback(lambda _: note(label, peer, started, thread))
        return future

    def profiler(should_profile, qualified_name, func, rpc_type, worker):  # torch passes here for remote() as well
        if rpc_type is api.RPCExecMode.REMOTE:
            _count("made", func)
            if _note:
                _note(f"remote {func.__name__}", worker.name, time.time_ns(), threading.get_ident())
        return plain_profiler(should_profile, qualified_name, func, rpc_type, worker)

    def run(call):
        _count("served", getattr(call, "func", None))
        return plain_run(call)

    api._invoke_rpc, api._enable_rpc_profiler, internal._run_function = invoke, profiler, run


def _count(side, func):
    name, module = getattr(func, "__name__", ""), getattr(func, "__module__", None) or ""
    if not module.startswith("torch.distributed.rpc") or name.startswith("_local_invoke"):
        with _lock:
            _counts[side] += 1


@contextlib.contextmanager
def recorded(path, rank, name, join_parts, wait_for_all):
    """Record this rank's RPCs while the block runs, in the file `path`.rank; spawned, rank 0 joins them in `path`."""
    global _note
    if not path:
        yield
        return
    events = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} ({name})"}}]

    def note(label, peer, started, thread):
        span = {"ts": started / 1000, "dur": (time.time_ns() - started) / 1000}  # microseconds
        events.append({"name": f"{label} -> {peer}", "ph": "X", "pid": rank, "tid": thread % 100_000} | span)

    _note = note
    try:
        yield
    finally:
        _note = None
    with open(f"{path}.{rank}", "w") as file:
        json.dump({"traceEvents": events}, file)
    if join_parts:
        wait_for_all()
        if rank == 0:
            _join_parts(path)


def _join_parts(path):
    """Join the parts of all ranks in one file: one time line, one process row per rank."""
    folder, base = os.path.split(os.path.abspath(path))
    events = []
    for part in sorted(os.listdir(folder)):
        if part.startswith(base + ".") and part[len(base) + 1 :].isdigit():
            with open(os.path.join(folder, part)) as file:
                events += json.load(file)["traceEvents"]
            os.unlink(os.path.join(folder, part))
    with open(path, "w") as file:
        json.dump({"traceEvents": events}, file)
