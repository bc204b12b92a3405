"""Every RPC of this process passes here: counted always, and for `--trace FILE.json` noted on a time line.

Runs in every process.  The time line is for ui.perfetto.dev: one row per thread of a rank, one bar per RPC from the
call to its reply, as the caller saw it: rpc_sync and rpc_async until the answer is there, remote until it is sent.
"""

import json
import os
import threading
import time

from torch.distributed.rpc import api, internal

from glue import checkpoint

_lock, _calls = threading.Lock(), 0
_note = None  # while recording, this is told of each call: (label, peer, start in ns, thread)
_recording = {}


def rpc_calls():
    """Return how many RPCs this process has made, and served for others, since its start.

    Without torch's own (of which type is this RRef?) and without built-in operators served, which C++ runs.
    """
    return _calls


def watch_calls():
    """Let every RPC pass through this module from now on.  Before init_rpc, which looks up what serves them once."""
    plain_invoke, plain_profiler, plain_run = api._invoke_rpc, api._enable_rpc_profiler, internal._run_function

    def invoke(to, func, rpc_type, args=None, kwargs=None, timeout=api.UNSET_RPC_TIMEOUT):
        _count(func, to)
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
            _count(func, worker)
            if _note:
                _note(f"remote {func.__name__}", worker.name, time.time_ns(), threading.get_ident())
        return plain_profiler(should_profile, qualified_name, func, rpc_type, worker)

    def run(call):
        _count(getattr(call, "func", None))
        return plain_run(call)

    api._invoke_rpc, api._enable_rpc_profiler, internal._run_function = invoke, profiler, run


def _count(func, to=None):
    global _calls
    if to is not None and api._to_worker_info(to).id == api.get_worker_info().id:
        return  # to itself: it will be served here, which counts
    name, module = getattr(func, "__name__", ""), getattr(func, "__module__", None) or ""
    if not module.startswith("torch.distributed.rpc") or name.startswith("_local_invoke"):
        with _lock:
            _calls += 1


def start(path, job):
    """From here on record this rank's RPCs, if there is a `path`."""
    global _note
    if path:
        _recording.update(path=f"{path}.{job.rank}", rank=job.rank, events=[])
        _recording["events"].append(
            {"name": "process_name", "ph": "M", "pid": job.rank, "args": {"name": job.names[job.rank]}}
        )
        _note = _add


def _add(label, peer, started, thread):
    span = {"ts": started / 1000, "dur": (time.time_ns() - started) / 1000}  # microseconds
    place = {"pid": _recording["rank"], "tid": thread % 100_000}
    _recording["events"].append({"name": f"{label} -> {peer}", "ph": "X"} | place | span)


def save(failure=None):
    """Write what was recorded to the file of this rank's own; `failure` says why the job ended here."""
    global _note
    if _note:
        _note = None
        if failure:
            place = {"pid": _recording["rank"], "tid": 0, "ts": time.time_ns() / 1000}
            _recording["events"].append({"name": failure, "ph": "i", "s": "g"} | place)
        write(_recording["path"], list(_recording["events"]))


def take_parts(args):
    """Return what all spawned ranks of this job have recorded, and remove their files."""
    events = []
    for part in (f"{args.trace}.{rank}" for rank in range(args.world_size)):
        if args.trace and os.path.exists(part):  # a killed rank has written none
            with open(part) as file:
                events += json.load(file)["traceEvents"]
            os.unlink(part)
    return events


def write(path, events):
    """Write one file for ui.perfetto.dev."""
    checkpoint.write_aside(path, lambda file: file.write(json.dumps({"traceEvents": events}).encode()))
