"""`--trace FILE.json`: every RPC of every rank on one time line, for ui.perfetto.dev.  (The same file in all four.)

Runs in every process while its role works, only when asked for.  One row per thread of a rank, one bar per RPC from
the call to its reply, as the caller saw it: rpc_sync and rpc_async until the answer is there, remote until it is sent.
"""

import contextlib
import json
import os
import threading
import time

from torch.distributed.rpc import api


@contextlib.contextmanager
def recorded(path, rank, name, join_parts, wait_for_all):
    """Record this rank's RPCs while the block runs, in the file `path`.rank; spawned, rank 0 joins them in `path`."""
    if not path:
        yield
        return
    events = []

    def note(label, peer, started, thread):
        events.append(
            {
                "name": f"{label} -> {peer}",
                "ph": "X",
                "pid": rank,
                "tid": thread % 100_000,
                "ts": started / 1000,
                "dur": (time.time_ns() - started) / 1000,
            }
        )

    plain_invoke, plain_profiler = api._invoke_rpc, api._enable_rpc_profiler

    def invoke(to, func, rpc_type, args=None, kwargs=None, timeout=api.UNSET_RPC_TIMEOUT):
        started, thread = time.time_ns(), threading.get_ident()
        future = plain_invoke(to, func, rpc_type, args, kwargs, timeout)
        # rref.rpc_sync().method(...) is a call of _local_invoke(rref, "method", ...): name the method, not the helper.
        method = args[1] if func.__name__.startswith("_local_invoke") else func.__name__
        peer = getattr(to, "name", to)
        future.add_done_callback(lambda _: note(f"{rpc_type.value} {method}", peer, started, thread))
        return future

    def profiler(should_profile, qualified_name, func, rpc_type, worker):  # torch passes here for remote() as well
        if rpc_type is api.RPCExecMode.REMOTE:
            note(f"remote {func.__name__}", worker.name, time.time_ns(), threading.get_ident())
        return plain_profiler(should_profile, qualified_name, func, rpc_type, worker)

    api._invoke_rpc, api._enable_rpc_profiler = invoke, profiler
    try:
        yield
    finally:
        api._invoke_rpc, api._enable_rpc_profiler = plain_invoke, plain_profiler
    events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank} ({name})"}})
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
