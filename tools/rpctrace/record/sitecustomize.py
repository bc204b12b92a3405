"""Records the RPCs of this process, and once a second where each of its threads stands. See ../__main__.py.

Python imports a module of this name when it starts, if it finds one on its path. This folder stands first in the
PYTHONPATH of the command, so that this happens in every Python process that the command starts. As most of them make no
RPC, nothing more is imported here than is needed.

A recording consists of bars. A bar is a period of time on one thread: a call, from its start until its answer; the
serving of a call; a wait; a step. A process writes a line into its .jsonl when a bar begins, and another one when it
ends, by copying it into memory that is mapped to the file. So nothing is lost when the process is killed, and a line
costs no call of the kernel. Its .now, which standing.py writes, says where it stands: the bars that are open, and the
stack of each thread.
"""

import contextlib
import functools
import importlib.machinery
import importlib.util
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
import weakref

encode = json.JSONEncoder(default=str).encode
quoted = functools.lru_cache(1000)(encode)  # a name
allocate = getattr(os, "posix_fallocate", lambda file, _, size: os.ftruncate(file, size))  # macOS has only the second
HERE = os.path.dirname(os.path.abspath(__file__))
SIZE, FILES = 4 << 20, 10  # bytes of a file, and how many a process keeps: at least its last 100,000 bars
TAIL = b"call"  # the end of a message whose call is recorded; before it stands the call's number, 16 bytes
NUMBER = "number of this call in the trace"  # no program has a keyword argument of this name
RREF = re.compile(r"created_on=(\d+), local_id=(\d+)")  # in str(rref), which nobody asks for the same number twice
RPC, C10D, OPTIM = "torch.distributed.rpc", "torch.distributed.distributed_c10d", "torch.distributed.optim"
PROFILER, PROXY = "torch.autograd.profiler", "torch.distributed.rpc.rref_proxy"
# What is replaced when a module has been imported. Most of these functions have private names, because torch has no
# public way to see every call. Each row has the module and the name; the method of Recorder that takes its place, or
# None if it is only used; and the parameters that it must have, or None for one of C++, which has no signature.
REPLACED = {
    RPC: [
        # A call that is made first enters torch's profiler, which has its kind and the worker that is called. Then its
        # function and arguments are packed, and the message is sent.
        (RPC, "api._enable_rpc_profiler", "note_call", "should_profile qualified_name func rpc_type dst_worker_info"),
        (RPC, "internal._InternalRPCPickler.serialize", "pack", "self obj"),
        (RPC, "api._invoke_rpc_python_udf", "send", None),
        (RPC, "api._invoke_remote_python_udf", "send", None),
        (RPC, "PyRRef._get_future", None, None),
        # The callee unpacks the message, and runs the function.
        (RPC, "internal.PythonUDF.__new__", None, "_cls func args kwargs"),
        (RPC, "internal._InternalRPCPickler.deserialize", "unpack", "self binary_data tensor_table"),
        (RPC, "internal._run_function", "serve", "python_udf"),
        (RPC, "PyRRef.to_here", "fetch", None),
        (RPC, "init_rpc", "join", "name backend rank world_size rpc_backend_options"),
        (RPC, "shutdown", "leave", "graceful timeout"),
        ("torch._C", "Future.wait", "wait", None),
        ("torch._C", "Future.then", "follow", None),
        ("torch._C", "_collect_all", "follow", None),
        ("torch.distributed.autograd", "backward", "backward", None),
    ],
    PROXY: [(PROXY, "_invoke_rpc", "follow_rref", "rref rpc_api func_name timeout args kwargs")],
    PROFILER: [
        (PROFILER, "record_function.__enter__", "enter_block", "self"),
        (PROFILER, "record_function.__exit__", "leave_block", None),
    ],
    C10D: [
        (C10D, "init_process_group", "meet", None),
        ("torch._C._distributed_c10d", "TCPStore.__init__", "meet", None),
    ],
    OPTIM: [(OPTIM, "DistributedOptimizer.step", "step", "self context_id")],
}


def start_recording():
    """Called at the start of every Python process of the command."""
    with contextlib.suppress(OSError):
        os.makedirs(os.environ["RPCTRACE_INTO"], exist_ok=True)
    sys.meta_path.insert(0, Recorder(os.path.abspath(os.environ["RPCTRACE_INTO"])))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
    if spec := importlib.machinery.PathFinder.find_spec("sitecustomize"):  # a further one, which this one hides
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])


class Recorder:
    """Records the bars of one process. A fork of this process begins a file of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.bars, self.calls, self.steps = itertools.count(), itertools.count(), itertools.count(1)
        self.torch = self.rpc = self.watched_by = None
        self.kept = []  # all mapped files, because closing one closes its descriptor, whatever that is by now
        self.begin_recording()
        os.register_at_fork(after_in_child=self.begin_recording)

    def begin_recording(self):
        self.process = os.urandom(8)  # distinguishes this process from all others, on other hosts as well
        self.base = os.path.join(self.folder, f"{socket.gethostname()}-{os.getpid()}-{self.process.hex()}")
        self.file, self.at, self.files, self.failed = b"", 0, 0, False
        self.maps = []  # of the files that are there
        self.kept.append(self.maps)
        self.worker = {}  # the name and the rank of this process, once it has called init_rpc
        self.cannot = {}  # why something is not recorded: one reason is enough
        self.open = {}  # number of a bar that has not ended -> (its line, what else is known of it)
        self.futures = weakref.WeakKeyDictionary()  # Future -> what completes it
        self.native = {}  # number of an RPC thread -> its number in the kernel
        self.moved = time.time_ns()  # when a bar has begun or ended
        self.lock = threading.RLock()  # a signal handler may make a call, while its thread is in write()
        # A call passes through several of the methods below, all on the thread that makes it. They exchange these
        # attributes: `call`, its (kind, callee's name); `packed`, its (kind, callee, number, name, start); and
        # `awaited`, the bar of the call for whose answer this thread waits next.
        self.thread = threading.local()

    # ---------------------------------------------------------------------------------------------- lines and files

    def begin(self, kind, name, args="{}", known=None, start=None):
        """Begin a bar on the current thread, and return its number. `args`: as JSON; `known`: for the .now only."""
        bar, start = next(self.bars), start or time.time_ns()
        line = f'{{"begin": {bar}, "ts": {start}, "tid": {threading.get_ident()}, "cat": "{kind}", '
        line += f'"name": {quoted(name)}, "args": {args}}}'
        with self.lock:  # another thread may begin the next file, which needs the bars that are open
            self.write(line)
            self.open[bar], self.moved = (line, known), start
        return bar

    def end(self, bar):
        self.open.pop(bar, None)
        self.moved = now = time.time_ns()
        self.write(f'{{"end": {bar}, "ts": {now}}}')

    def not_recorded(self, why):
        if not self.cannot:
            self.cannot = {"cannot": why}
            self.write(json.dumps(self.cannot))

    def write(self, line):
        if self.failed:
            return
        data = line.encode()[: SIZE // 4] + b"\n"
        size = len(data)
        try:
            with self.lock:
                if self.at + size > len(self.file):
                    self.open_file()
                at = self.at
                self.at = at + size  # before the copy, because a signal handler may write a line
                self.file[at : at + size] = data
        except OSError as error:  # for example, the disk is full: the program must go on
            self.failed = True
            why = f"rpctrace: process {os.getpid()} is not recorded any more: {error.strerror}"
            with contextlib.suppress(Exception):
                if os.path.isdir(self.folder):  # or the command has ended before this process
                    print(why, file=sys.stderr)

    def open_file(self):
        """Begin the next file, or use the oldest one again. Its first lines say who it is, and what is open.

        It has its whole length at once, filled with zeros: if the disk is full, this fails, and not the program.
        """
        import mmap

        who = {"host": socket.gethostname(), "pid": os.getpid(), "main": threading.main_thread().ident}
        lines = [json.dumps(who | self.worker | self.cannot), *(line for line, _ in list(self.open.values()))]
        first, path = "\n".join(lines).encode()[: SIZE // 2] + b"\n", f"{self.base}.{self.files:06}.jsonl"
        if len(self.maps) == FILES:
            os.rename(f"{self.base}.{self.files - FILES:06}.jsonl", path)
            self.file = self.maps[self.files % FILES]
            self.file[:] = bytes(SIZE)
        else:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                allocate(file, 0, SIZE)
                self.maps.append(mmap.mmap(file, SIZE))
            finally:
                os.close(file)
            self.file = self.maps[-1]
        self.file[: len(first)], self.at, self.files = first, len(first), self.files + 1

    # ------------------------------------------------------------------------------------------ functions of torch

    def find_spec(self, name, path=None, target=None):
        """Find a module as Python does without us, but let replace() execute it. Python asks this at each import."""
        if name not in REPLACED:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec and spec.loader:
            spec.loader.exec_module = functools.partial(self.replace, spec.loader.exec_module)
        return spec

    def replace(self, execute, module):
        """Execute a module, and put ours around all functions of REPLACED for it, or around none."""
        execute(module)
        import inspect  # torch has imported it

        self.torch, self.rpc = sys.modules["torch"], sys.modules.get(RPC)
        done = []
        try:
            for where, path, ours, parameters in REPLACED[module.__name__]:
                *outer, name = path.split(".")
                owner = functools.reduce(lambda one, name: getattr(one, name, None), outer, sys.modules.get(where))
                plain = getattr(owner, name, None)
                if not plain:
                    raise LookupError(f"there is no {where}.{path}")
                if parameters and list(inspect.signature(plain).parameters) != parameters.split():
                    raise LookupError(f"{where}.{path} has other parameters")
                if ours:
                    done.append((owner, name, vars(owner).get(name)))
                    setattr(owner, name, put_around(plain, getattr(self, ours)))
            if module is self.rpc:
                self.write("{}")  # so it is known that this process is there
        except Exception as error:  # whatever it is, the program runs on
            for owner, name, plain in reversed(done):
                delattr(owner, name) if plain is None else setattr(owner, name, plain)
            self.not_recorded(f"torch {self.torch.__version__}: {error}")

    # Each of these gets the function that it replaces as `plain`.

    def around(self, kind, name, about, plain, /, *args, **kwargs):
        known = about.pop("known", None)
        bar = self.begin(kind, name, encode(about), known)
        try:
            return plain(*args, **kwargs)
        finally:
            self.end(bar)

    def join(self, plain, name, backend=None, rank=-1, world_size=None, rpc_backend_options=None):
        if self.worker.get("worker", name) != name:  # from now on, it is another worker
            self.begin_recording()
        self.watch()
        about = {"worker": name, "rank": rank, "world": world_size if isinstance(world_size, int) else None}
        self.around("group", "init_rpc", about, plain, name, backend, rank, world_size, rpc_backend_options)
        with contextlib.suppress(Exception):  # the agent of another backend is not the current one
            me = self.rpc.get_worker_info()
            self.worker = {"worker": me.name, "rank": me.id, "world": about["world"]}
            self.write(json.dumps(self.worker))

    def leave(self, plain, /, *args, **kwargs):
        given = dict(zip(("graceful", "timeout"), args, strict=False)) | kwargs
        about = {"limit": given.get("timeout"), "graceful": bool(given.get("graceful", True))}
        self.around("group", "shutdown", about, plain, *args, **kwargs)
        self.worker = {**self.worker, "left": True}

    def meet(self, plain, /, *args, **kwargs):
        """A store, too, is a place to meet, but making one has no bar."""
        self.watch()
        if plain.__name__ == "__init__":
            return plain(*args, **kwargs)
        about = {"rank": kwargs.get("rank", -1), "world": kwargs.get("world_size", -1)}
        if about["world"] < 0:
            with contextlib.suppress(KeyError, ValueError):
                about = {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"])}
        return self.around("group", "init_process_group", about, plain, *args, **kwargs)

    def step(self, plain, /, *args, **kwargs):
        return self.around("work", "optimizer step", {}, plain, *args, **kwargs)

    def backward(self, plain, /, *args, **kwargs):
        """The workers that take part are in the context, as far as this process knows them."""
        workers = []
        with contextlib.suppress(Exception):
            context = kwargs["context_id"] if "context_id" in kwargs else args[0]
            workers = sorted(self.torch.distributed.autograd._retrieve_context(context)._known_worker_ids())
        return self.around("work", "backward", {"workers": workers}, plain, *args, **kwargs)

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
        args, known = f'{{"to": {quoted(callee)}, "call": "{number}", "limit": {self.limit_of(message)}}}', {}
        bar = self.begin(kind, name, args, known, start)
        try:
            answer = plain(*message)
        except BaseException:
            self.end(bar)
            raise
        if kind == "sync":
            self.thread.awaited = bar  # it ends when the wait that follows ends
            return answer
        future = answer
        if kind == "remote":  # remote() returns an RRef
            known["rref"], future = number_of(answer), answer._get_future()
        self.futures[future] = [bar]
        future.add_done_callback(lambda _: self.end(bar))
        return answer

    def limit_of(self, words):
        """Return the time limit, the only number among the words of a call: -1 is torch's default, and 0 is none."""
        limit = next((word for word in words if type(word) in (int, float)), -1)
        return round(min(limit if limit >= 0 else self.rpc.api.get_rpc_timeout(), 1e9), 3)

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
        name, self.native[threading.get_ident()] = name_of(message), threading.get_native_id()
        result = self.around("run", name, {"call": number}, plain, message)
        if isinstance(result, self.torch._C.Future):  # async_execution: the answer leaves when this Future is completed
            held = self.begin("held", name, f'{{"call": "{number}"}}')
            result.add_done_callback(lambda _: self.end(held))
        return result

    def wait(self, plain, future):
        bar = vars(self.thread).pop("awaited", None)
        if bar is None:
            if future.done():
                return plain(future)
            of_python = type(future) is not self.torch._C.Future  # the program has made it
            known = {"future": self.futures.get(future, []), "of_python": of_python}
            bar = self.begin("wait", "wait", known=known)
        try:
            return plain(future)
        finally:
            self.end(bar)

    def fetch(self, plain, rref, /, *args, **kwargs):
        try:
            known = {"rref": number_of(rref), "owner": rref.owner_name()}
            about = {"known": known, "limit": self.limit_of((*args, *kwargs.values()))}
        except RuntimeError:  # RPC has ended
            return plain(rref, *args, **kwargs)
        return self.around("wait", "to_here", about, plain, rref, *args, **kwargs)

    # What completes a Future: the numbers of bars, or [owner, method] of an object behind an RRef.

    def follow(self, plain, futures, *callback):
        """Future.then, or what is below wait_all and collect_all."""
        futures = futures if callback else list(futures)  # any iterable
        answer = plain(futures, *callback)
        several = [futures] if callback else futures
        known = [self.futures.get(future, []) for future in several if not future.done()]
        self.futures[answer] = list(itertools.chain(*known)) if all(known) else []
        return answer

    def follow_rref(self, plain, rref, rpc_api, func_name, timeout, /, *args, **kwargs):
        answer = plain(rref, rpc_api, func_name, timeout, *args, **kwargs)
        if isinstance(answer, self.torch._C.Future):
            self.futures.setdefault(answer, [[rref.owner_name(), func_name]])
        return answer

    # torch.profiler.record_function

    def enter_block(self, plain, block):
        if block.name in ("step", "wait"):
            block.bar = self.begin(block.name, f"step {next(self.steps)}" if block.name == "step" else block.name)
        return plain(block)

    def leave_block(self, plain, block, *error):
        if hasattr(block, "bar"):
            self.end(block.bar)
        return plain(block, *error)

    # ------------------------------------------------------------------------------------------ where threads stand

    def is_library(self, path):
        """Return whether a file belongs to torch, to Python, or to us: the reader looks for his own lines."""
        ours = (os.path.dirname(self.torch.__file__) + os.sep, HERE + os.sep, "<frozen")
        return path.startswith(ours) or (path.startswith(os.path.dirname(os.__file__)) and "site-packages" not in path)

    def watch(self):
        """Start the thread that writes the .now. Not earlier: a process that forks ranks has one thread."""
        if self.watched_by != os.getpid() and self.torch:
            self.watched_by = os.getpid()
            try:
                spec = importlib.util.spec_from_file_location("rpctrace_standing", os.path.join(HERE, "standing.py"))
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                module.Watcher(self)
            except Exception as error:
                self.not_recorded(f"where the threads stand: {error}")


def put_around(plain, ours):
    """Return a function that calls `ours` with the plain function and its arguments."""

    @functools.wraps(plain)
    def function(*args, **kwargs):
        return ours(plain, *args, **kwargs)

    return function


def name_of(message):
    """Return the name of the function or method that a call runs, instead of the helper of torch that runs it."""
    func, args, _ = message
    while isinstance(func, functools.partial):
        func = func.func
    try:  # a callable may answer any attribute, with anything, or raise
        name, module = func.__name__, str(func.__module__)
    except Exception:
        name = module = None
    if not isinstance(name, str):
        return type(func).__name__  # never str(func), which may be slow, or raise
    if module == PROXY:  # rref.rpc_sync().method() is _local_invoke(rref, "method")
        return args[1]
    return f"torch.{module.split('.')[2]}.{name}" if module.startswith("torch.distributed.") else name


def number_of(rref):
    found = RREF.search(str(rref))
    return ".".join(found.groups()) if found else ""


if __name__ == "sitecustomize" and "RPCTRACE_INTO" in os.environ:
    start_recording()
