"""Every RPC of this process is counted, and those that it serves.

Runs in every process.
"""

import threading

from torch.distributed.rpc import api, internal

_lock, _calls = threading.Lock(), 0
this_thread = threading.local()  # .call: (kind, worker's number) of the call that this thread is making


def so_far():
    """Return how many RPCs this process has made, and served for others, since its start.

    Without torch's own (of which type is this RRef?) and without built-in operators served, which C++ runs.
    """
    return _calls


def watch():
    """Count every RPC from now on.  Before init_rpc, which looks up what serves them once."""
    plain_profiler, plain_run = api._enable_rpc_profiler, internal._run_function

    def profiler(should_profile, qualified_name, func, rpc_type, worker):  # torch passes here with every call it makes
        _count(func, worker)
        this_thread.call = rpc_type.value, worker.id
        return plain_profiler(should_profile, qualified_name, func, rpc_type, worker)

    def run(call):
        _count(getattr(call, "func", None))
        return plain_run(call)

    api._enable_rpc_profiler, internal._run_function = profiler, run


def _count(func, worker=None):
    global _calls
    if worker is not None and worker.id == api.get_worker_info().id:
        return  # to itself: it will be served here, which counts
    name, module = getattr(func, "__name__", ""), getattr(func, "__module__", None) or ""
    if not module.startswith("torch.distributed.rpc") or name.startswith("_local_invoke"):
        with _lock:
            _calls += 1
