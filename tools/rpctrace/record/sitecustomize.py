"""Records the RPCs of this process. See ../cli.py.

Python imports a module of this name when it starts, if it finds one on its path. This folder stands first in the
PYTHONPATH of the command, so that this happens in every Python process that the command starts. As most of them make no
RPC, nothing more is imported here than is needed.

A recording consists of bars. A bar is a period of time on one thread. A process writes a line into its .jsonl when a
bar begins, and another one when it ends (rpctrace_files.py), by copying it into memory that is mapped to the file. So
nothing is lost when the process is killed, and a line costs no call of the kernel. The lines have these keys:

begin, ts, tid, cat, name, args   a bar begins: its number, the time in ns, its thread, and its kind
end, ts                           this bar ends
host, pid, main                   of the first line: the process, and the number of its main thread
worker, rank, world, limit, left  init_rpc has returned; world is its world_size, limit the time limit of calls
left, full, cannot                shutdown has returned; the file is full; why something is not recorded

The kinds (cat) are sync, async and remote, a call at the caller; run, the function at the callee, and held, until the
Future that it has returned is complete; wait; step; work, of an optimizer; and backward. In args, the key call is the
number of the call, the same on both sides; to is the callee; and workers are those of a backward pass.
"""

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import itertools
import json
import os
import socket
import sys
import threading
import time

import rpctrace_files  # this folder is in the path, for as long as this file is executed
import rpctrace_replaced

quoted = functools.lru_cache(1000)(json.JSONEncoder(default=str).encode)  # a name
HERE = os.path.dirname(os.path.abspath(__file__))
TAIL = b"call"  # the end of a message whose call is recorded; before it stands the call's number, 16 bytes
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)  # of linux/prctl.h
NUMBER = "number of this call in the trace"  # no program has a keyword argument of this name


class Recorder:
    """Records the bars of one process. A fork of this process begins a file of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.bars, self.calls, self.steps = itertools.count(), itertools.count(), itertools.count(1)
        self.torch = self.rpc = None
        self.begin_recording()
        os.register_at_fork(after_in_child=self.begin_recording)

    def begin_recording(self):
        with contextlib.suppress(AttributeError, OSError):  # not Linux
            # Where Yama lets only a parent look into a process, as on Ubuntu, this lets py-spy do so, too.
            ctypes.CDLL(None).prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)
        self.process = os.urandom(8)  # distinguishes this process from all others, on other hosts as well
        host, pid = socket.gethostname(), os.getpid()
        first = json.dumps({"host": host, "pid": pid, "main": threading.main_thread().ident})
        path = os.path.join(self.folder, f"{host}-{pid}-{self.process.hex()}.jsonl")
        self.write = rpctrace_files.File(path, first).write
        self.cannot = {}  # why something is not recorded: one reason is enough
        # A call passes through several of the methods below, all on the thread that makes it. They exchange these
        # attributes: `call`, its (kind, callee's name); `packed`, its (kind, callee, number, name, start); and
        # `awaited`, the bar of the call for whose answer this thread waits next.
        self.thread = threading.local()

    # ------------------------------------------------------------------------------------------------------- lines

    def begin(self, kind, name, about="{}", start=None):
        """Begin a bar on the current thread, and return its number. `about`: what else is known of it, as JSON."""
        bar, start = next(self.bars), start or time.time_ns()
        line = f'{{"begin": {bar}, "ts": {start}, "tid": {threading.get_ident()}, "cat": "{kind}", '
        line += f'"name": {quoted(name)}, "args": {about}}}'
        self.write(line)
        return bar

    def end(self, bar):
        self.write(f'{{"end": {bar}, "ts": {time.time_ns()}}}')

    def not_recorded(self, why):
        if not self.cannot:
            self.cannot = {"cannot": why}
            self.write(json.dumps(self.cannot))

    def around(self, kind, name, about, plain, /, *args, **kwargs):
        """Call a function, and record it as a bar."""
        bar = self.begin(kind, name, about)
        try:
            return plain(*args, **kwargs)
        finally:
            self.end(bar)

    # ------------------------------------------------------------------------------------------ functions of torch
    # Each of these gets the function that it replaces as `plain`.

    def join(self, plain, name, backend=None, rank=-1, world_size=None, rpc_backend_options=None):
        self.around("wait", "init_rpc", "{}", plain, name, backend, rank, world_size, rpc_backend_options)
        with contextlib.suppress(Exception):  # the agent of another backend is not the current one
            me = self.rpc.get_worker_info()
            limit = self.rpc.get_rpc_timeout()
            joined = {"worker": me.name, "rank": me.id, "world": world_size, "limit": limit, "left": False}
            self.write(json.dumps(joined))

    def leave(self, plain, /, *args, **kwargs):
        self.around("wait", "shutdown", "{}", plain, *args, **kwargs)
        self.write('{"left": true}')

    def step(self, plain, /, *args, **kwargs):
        return self.around("work", "optimizer step", "{}", plain, *args, **kwargs)

    def backward(self, plain, context_id, *args, **kwargs):
        """The workers that take part are in the context, as far as this process knows them."""
        workers = []
        with contextlib.suppress(Exception):
            workers = sorted(self.torch.distributed.autograd._retrieve_context(context_id)._known_worker_ids())
        return self.around("backward", "backward", f'{{"workers": {workers}}}', plain, context_id, *args, **kwargs)

    def note_call(self, plain, should_profile, qualified_name, func, rpc_type, dst_worker_info):
        self.thread.call = rpc_type.value, dst_worker_info.name
        return plain(should_profile, qualified_name, func, rpc_type, dst_worker_info)

    def pack(self, plain, pickler, message):
        """Add the number of the call behind the pickle, where a callee that is not recorded does not notice it."""
        call = vars(self.thread).pop("call", None)
        if not call or not isinstance(message, self.rpc.internal.PythonUDF):  # what is packed is an answer
            return plain(pickler, message)
        start, number = time.time_ns(), self.process + next(self.calls).to_bytes(8, "big")
        data, tensors = plain(pickler, message)
        self.thread.packed = *call, number.hex(), name_of(message), start
        return data + number + TAIL, tensors

    def send(self, plain, *message):
        packed = vars(self.thread).pop("packed", None)
        if not packed:
            self.not_recorded("some calls are packed by a pickler of the program, which does not use torch's")
            return plain(*message)
        kind, callee, number, name, start = packed
        bar = self.begin(kind, name, f'{{"to": {quoted(callee)}, "call": "{number}"}}', start)
        try:
            answer = plain(*message)
        except BaseException:
            self.end(bar)
            raise
        if kind == "sync":
            self.thread.awaited = bar  # it ends when the wait that follows ends
        else:
            future = answer if kind == "async" else answer._get_future()  # remote() returns an RRef
            future.add_done_callback(lambda _: self.end(bar))
        return answer

    def unpack(self, plain, pickler, data, tensors):
        message = plain(pickler, data, tensors)
        if data.endswith(TAIL) and isinstance(message, self.rpc.internal.PythonUDF):  # the last byte of a pickle is "."
            number = data[-len(TAIL) - 16 : -len(TAIL)].hex()
            return message._replace(kwargs={**message.kwargs, NUMBER: number})
        return message

    def serve(self, plain, message):
        number = getattr(message, "kwargs", {}).pop(NUMBER, None)
        if number is None:
            return plain(message)
        name, about = name_of(message), f'{{"call": "{number}"}}'
        result = self.around("run", name, about, plain, message)
        if isinstance(result, self.torch._C.Future):  # async_execution: the answer leaves when this Future is completed
            held = self.begin("held", name, about)
            result.add_done_callback(lambda _: self.end(held))
        return result

    def wait(self, plain, future):
        bar = vars(self.thread).pop("awaited", None)
        if bar is None:
            if future.done():
                return plain(future)
            bar = self.begin("wait", "wait")
        try:
            return plain(future)
        finally:
            self.end(bar)

    def fetch(self, plain, rref, /, *args, **kwargs):
        return self.around("wait", "to_here", "{}", plain, rref, *args, **kwargs)

    # torch.profiler.record_function

    def enter_block(self, plain, block):
        if block.name in ("step", "wait"):
            block.bar = self.begin(block.name, f"step {next(self.steps)}" if block.name == "step" else block.name)
        return plain(block)

    def leave_block(self, plain, block, *error):
        if hasattr(block, "bar"):
            self.end(block.bar)
        return plain(block, *error)


def name_of(message):
    """Return the name of the function or method that a call runs, instead of the helper of torch that runs it."""
    func, args, _ = message
    while isinstance(func, functools.partial):
        func = func.func
    try:  # a callable may answer any attribute, with anything, or raise
        name, module = str(func.__name__), str(func.__module__)
    except Exception:
        return type(func).__name__  # never str(func), which may be slow, or raise
    if module == "torch.distributed.rpc.rref_proxy":  # rref.rpc_sync().method() is _local_invoke(rref, "method")
        return args[1]
    return f"torch.{module.split('.')[2]}.{name}" if module.startswith("torch.distributed.") else name


if __name__ == "sitecustomize" and "RPCTRACE_INTO" in os.environ:
    with contextlib.suppress(OSError):
        os.makedirs(os.environ["RPCTRACE_INTO"], exist_ok=True)
    recorder = Recorder(os.path.abspath(os.environ["RPCTRACE_INTO"]))
    sys.meta_path.insert(0, rpctrace_replaced.Finder(recorder))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
    if spec := importlib.machinery.PathFinder.find_spec("sitecustomize"):  # a further one, which this one hides
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])
