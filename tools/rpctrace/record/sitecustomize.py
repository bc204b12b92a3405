"""Records the RPCs of this process, and once a second where each of its threads stands. See ../__main__.py.

Python imports a module of this name when it starts, if it finds one on its path. This folder stands first in the
PYTHONPATH of the command, so that this happens in every Python process that the command starts. As most of them make no
RPC, nothing more is imported here than is needed.

A recording consists of bars. A bar is a period of time on one thread: a call, from its start until its answer; the
serving of a call; a wait; a step. A process writes a line into its .jsonl when a bar begins, and another one when it
ends. Each line goes to the kernel at once, so nothing is lost when the process is killed. Its .now, which standing.py
writes, says where it stands: the bars that are open, and the stack of each thread.
"""

import contextlib
import functools
import importlib.machinery
import importlib.util
import itertools
import json
import operator
import os
import re
import socket
import sys
import threading
import time
import weakref

MARKS = {"step", "wait"}  # the names for torch.profiler.record_function
LINES = 200_000  # in a file. A process keeps its last two files, and so at least its last 100,000 bars
TAIL = b"call"  # the end of a message whose call is recorded; before it stands the call's number, 16 bytes
NUMBER = "number of this call in the trace"  # no program has a keyword argument of this name
PARAMETERS = ("name", "backend", "rank", "world_size", "rpc_backend_options")  # of init_rpc
RREF = re.compile(r"created_on=(\d+), local_id=(\d+)")  # in str(rref), which nobody asks for the same number twice

quoted = functools.lru_cache(4096)(json.dumps)


def written(key, value):
    """Return what json.dumps returns, in a tenth of its time. The number of a call is another one each time."""
    if key == "call":
        return f'"{value}"'
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def start_recording():
    """Called at the start of every Python process of the command."""
    here = os.path.dirname(os.path.abspath(__file__))
    recorder = Recorder(os.path.abspath(os.environ["RPCTRACE_INTO"]))
    sys.meta_path.insert(0, Hook(recorder.replacements()))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    if spec := importlib.machinery.PathFinder.find_spec("sitecustomize"):  # a further one, which this one hides
        sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sitecustomize"])


class Hook:
    """Calls a function when a module has been imported. `after`: {name of the module: the function}."""

    def __init__(self, after):
        self.after = after

    def find_spec(self, name, path=None, target=None):
        if name not in self.after:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec and spec.loader:
            spec.loader.exec_module = functools.partial(self.execute, spec.loader.exec_module)
        return spec

    def execute(self, plain, module):
        plain(module)
        self.after[module.__name__](module)


class Recorder:
    """Records the bars of one process. A fork of this process begins a file of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.bars, self.calls, self.steps = itertools.count(), itertools.count(), itertools.count(1)
        self.torch = None
        self.begin_recording()
        os.register_at_fork(after_in_child=self.begin_recording)

    def begin_recording(self):
        self.process = os.urandom(8)  # distinguishes this process from all others, on other hosts as well
        self.name, self.file, self.paths, self.lines = "", None, [], 0
        self.failed, self.watched, self.said = False, False, set()
        self.worker = {}  # the name and the rank of this process, once it has called init_rpc
        self.open = {}  # number of a bar that has not ended -> (its line, what else is known of it)
        self.futures = {}  # id of a Future -> (a weak reference to it, what completes it)
        self.most_futures = 10_000
        self.moved = time.time_ns()  # when a bar has begun or ended
        self.lock = threading.RLock()  # a signal handler may make a call, while its thread is in write()
        # A call passes through several of the methods below, all on the thread that makes it. They exchange these
        # attributes: `call`, its (kind, callee's name); `packed`, its (kind, callee, number, name, start); and
        # `awaited`, the bar of the call for whose answer this thread waits next.
        self.thread = threading.local()

    # ---------------------------------------------------------------------------------------------- lines and files

    def begin(self, kind, name, known=None, start=None, **args):
        """Begin a bar on the current thread, and return its number. `known`: for the .now only."""
        bar, tid, start = next(self.bars), threading.get_ident(), start or time.time_ns()
        inside = ", ".join([f'"{key}": {written(key, value)}' for key, value in args.items()])
        line = f'{{"begin": {bar}, "ts": {start}, "tid": {tid}, "cat": "{kind}", "name": {quoted(name)}, '
        line += f'"args": {{{inside}}}}}'
        self.write(line)
        self.open[bar], self.moved = (line, known), start
        return bar

    def end(self, bar):
        self.open.pop(bar, None)
        self.moved = now = time.time_ns()
        self.write(f'{{"end": {bar}, "ts": {now}}}')

    def note(self, **what):
        """Write something about this process. The last such line counts."""
        self.write(json.dumps(what))

    def not_recorded(self, why):
        if why not in self.said:
            self.said.add(why)
            self.note(cannot=why)

    def write(self, line):
        if self.failed:
            return
        try:
            with self.lock:
                if self.lines % LINES == 0:
                    self.open_next_file()
                elif not self.is_open():
                    self.open_file()
                self.lines += 1
                os.write(self.file, line.encode() + b"\n")
        except OSError as error:  # for example, the disk is full: the program must go on
            self.failed = True
            if os.path.isdir(self.folder):  # or the command has ended before this process
                print(f"rpctrace: process {os.getpid()} is not recorded any more: {error.strerror}", file=sys.stderr)

    def open_next_file(self):
        if self.is_open():
            os.close(self.file)
        self.paths.append(f"{self.base()}.{len(self.paths):04}.jsonl")
        self.open_file()
        who = {"host": socket.gethostname(), "pid": os.getpid(), "main": threading.main_thread().ident, **self.worker}
        for line in [json.dumps(who), *(line for line, _ in list(self.open.values()))]:
            os.write(self.file, line.encode() + b"\n")
        for path in self.paths[-3:-2]:
            os.remove(path)

    def base(self):
        """Return the path of our files, without their endings."""
        if not self.name:
            self.name = f"{socket.gethostname()}-{os.getpid()}-{self.process.hex()}"
        return os.path.join(self.folder, self.name)

    def open_file(self):
        self.file = os.open(self.paths[-1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self.opened = os.fstat(self.file)

    def is_open(self):
        """Return whether our file is still open. A program may close all descriptors, and use their numbers again."""
        try:
            return self.file is not None and os.path.samestat(os.fstat(self.file), self.opened)
        except OSError:
            return False

    # ------------------------------------------------------------------------------------------ functions of torch

    def replacements(self):
        """Return {module: a function that puts ours around functions of it}, for Hook.

        Most of these functions have private names, because torch has no public way to see every call. Here are all of
        them, with the parameters that they must have; None for one of C++, which has no signature.
        """
        rpc = {
            # A call that is made first enters torch's profiler, which has its kind and the worker that is called. Then
            # its function and arguments are packed, and the message is sent.
            "api._enable_rpc_profiler": (
                self.note_call,
                ("should_profile", "qualified_name", "func", "rpc_type", "dst_worker_info"),
            ),
            "internal._InternalRPCPickler.serialize": (self.pack, ("self", "obj")),
            "api._invoke_rpc_python_udf": (self.send, None),
            "api._invoke_remote_python_udf": (self.send, None),
            "PyRRef._get_future": (None, None),  # used, not replaced
            # The callee unpacks the message, and runs the function.
            "internal.PythonUDF.__new__": (None, ("_cls", "func", "args", "kwargs")),
            "internal._InternalRPCPickler.deserialize": (self.unpack, ("self", "binary_data", "tensor_table")),
            "internal._run_function": (self.serve, ("python_udf",)),
            "PyRRef.to_here": (self.fetch, None),
            "rref_proxy._invoke_rpc": (
                self.follow_rref,
                ("rref", "rpc_api", "func_name", "timeout", "args", "kwargs"),
            ),
            "init_rpc": (self.join, PARAMETERS),
            "shutdown": (self.leave, ("graceful", "timeout")),
        }
        futures = {"Future.wait": (self.wait, None), "Future.then": (self.follow_then, None)}
        futures["_collect_all"] = (self.follow_all, None)
        profiler = {"__enter__": (self.enter_block, ("self",)), "__exit__": (self.leave_block, None)}

        def of_rpc(module):
            import torch  # it is being imported, and imports this module

            with contextlib.suppress(ImportError):
                importlib.import_module("torch.distributed.rpc.rref_proxy")  # otherwise the first RRef imports it
            self.torch, self.rpc = torch, module
            self.note(torch=str(torch.__version__))
            if self.replace(
                *((module, path, *how) for path, how in rpc.items()),
                *((torch._C, path, *how) for path, how in futures.items()),
            ):
                self.replace((torch.distributed.autograd, "backward", self.backward, None))

        def of_profiler(module):
            self.replace(*((module, f"record_function.{path}", *how) for path, how in profiler.items()))

        def of_meeting(module):
            stores = sys.modules.get("torch._C._distributed_c10d", module)
            self.replace(
                (module, "init_process_group", self.meet, None), (stores, "TCPStore.__init__", self.meet, None)
            )

        def of_optim(module):
            step = self.recorded("work", "optimizer step")
            self.replace((module, "DistributedOptimizer.step", step, ("self", "context_id")))

        return {
            "torch.distributed.rpc": of_rpc,  # `import torch` imports it
            "torch.autograd.profiler": of_profiler,
            "torch.distributed.distributed_c10d": of_meeting,
            "torch.distributed.optim": of_optim,
        }

    def replace(self, *functions):
        """Put ours around all of these (module, path, ours, parameters), or around none; return whether it could."""
        done = []
        try:
            import torch

            version = str(torch.__version__)
            for module, path, _, parameters in functions:
                check(module, path, parameters, version)
            for module, path, ours, _ in functions:
                owner, _, name = path.rpartition(".")
                owner = operator.attrgetter(owner)(module) if owner else module
                if ours:
                    done.append((owner, name, vars(owner).get(name)))
                    put_around(owner, name, ours)
        except Exception as error:  # whatever it is, the program runs on
            for owner, name, plain in reversed(done):
                delattr(owner, name) if plain is None else setattr(owner, name, plain)
            if not self.said:  # one line is enough
                self.not_recorded(str(error))
            return False
        return True

    # Each of these gets the function that it replaces as `plain`.

    def recorded(self, kind, name):
        """Return a function that records a bar of this kind while the plain one runs."""
        return lambda plain, *args, **kwargs: self.around(kind, name, {}, plain, *args, **kwargs)

    def around(self, kind, name, about, plain, /, *args, **kwargs):
        bar = self.begin(kind, name, **about)
        try:
            return plain(*args, **kwargs)
        finally:
            self.end(bar)

    def join(self, plain, /, *args, **kwargs):
        self.watch()
        given = dict(zip(PARAMETERS, args, strict=False)) | kwargs
        about = {"worker": str(given.get("name")), "rank": plain_number(given.get("rank"))}
        about["world"] = plain_number(given.get("world_size"))
        start = time.time_ns()
        self.around("group", "init_rpc", about, plain, *args, **kwargs)
        with contextlib.suppress(Exception):  # the agent of another backend is not the current one
            me = self.rpc.get_worker_info()
            self.worker = {"worker": me.name, "rank": me.id, "world": about["world"]}
            self.note(since=start, **self.worker)

    def leave(self, plain, /, *args, **kwargs):
        graceful = kwargs.get("graceful", args[0] if args else True)
        limit = kwargs.get("timeout", args[1] if len(args) > 1 else 0)
        about = {"limit": plain_number(limit), "graceful": bool(graceful)}
        self.around("group", "shutdown", about, plain, *args, **kwargs)
        self.worker = {**self.worker, "left": time.time_ns()}

    def meet(self, plain, /, *args, **kwargs):
        self.watch()
        if plain.__name__ != "init_process_group":
            return plain(*args, **kwargs)
        about = {key: plain_number(kwargs.get(key)) for key in ("rank", "world_size")}
        return self.around("group", "init_process_group", about, plain, *args, **kwargs)

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
        call = vars(self.thread).pop("call", None)
        kind, callee, number, name, start = vars(self.thread).pop("packed", (None,) * 5)
        if not kind:
            if call:
                self.not_recorded("some calls are packed by a pickler of the program, which does not use torch's")
            return plain(*message)
        about = {"to": callee, "call": number, "limit": self.limit(message)}
        if kind != "sync":
            about["at"] = place_of(sys._getframe(2), self.is_library)
        known = {}
        bar = self.begin(kind, name, known, start, **about)
        try:
            answer = plain(*message)
        except BaseException:
            self.end(bar)
            raise
        if kind == "sync":
            self.thread.awaited = bar  # it ends when the wait that follows ends
            return answer
        if kind == "remote":  # remote() returns an RRef
            known["rref"] = number_of(answer)
            answer._get_future().add_done_callback(lambda _: self.end(bar))
        else:
            self.know(answer, [bar])
            answer.add_done_callback(lambda _: self.end(bar))
        return answer

    def limit(self, message):
        """Return after how many seconds a call fails, 0 for never. It is the number in its message, -1 for unset."""
        numbers = [word for word in message if isinstance(word, (int, float)) and not isinstance(word, bool)]
        return round(self.rpc.api.get_rpc_timeout() if not numbers or numbers[0] < 0 else numbers[0], 3)

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
        name = name_of(message)
        result = self.around("run", name, {"call": number}, plain, message)
        if isinstance(result, self.torch._C.Future):  # async_execution: the answer leaves when this Future is completed
            held = self.begin("held", name, call=number)
            result.add_done_callback(lambda _: self.end(held))
        return result

    def wait(self, plain, future):
        bar = vars(self.thread).pop("awaited", None)
        if bar is None:
            if future.done():
                return plain(future)
            of_python = type(future) is not self.torch._C.Future  # the program has made it
            bar = self.begin("wait", "wait", {"future": self.known(future), "of_python": of_python})
        try:
            return plain(future)
        finally:
            self.end(bar)

    def fetch(self, plain, rref, /, *args, **kwargs):
        bar = self.begin("wait", "to_here", {"rref": number_of(rref), "owner": rref.owner_name()})
        try:
            return plain(rref, *args, **kwargs)
        finally:
            self.end(bar)

    # What completes a Future, for the .now: the bars of calls, or [owner, method] of an object behind an RRef.

    def know(self, future, completes):
        if len(self.futures) > self.most_futures:  # forget those that are gone
            self.futures = {key: one for key, one in list(self.futures.items()) if one[0]()}
            self.most_futures = 10_000 + 2 * len(self.futures)
        self.futures[id(future)] = weakref.ref(future), completes

    def known(self, future):
        reference, completes = self.futures.get(id(future), (None, []))
        return completes if reference and reference() is future else []

    def follow_then(self, plain, future, callback):
        following = plain(future, callback)
        if known := self.known(future):
            self.know(following, known)
        return following

    def follow_all(self, plain, futures):
        collected, known = plain(futures), [self.known(future) for future in futures if not future.done()]
        if known and all(known):
            self.know(collected, list(itertools.chain(*known)))
        return collected

    def follow_rref(self, plain, rref, rpc_api, func_name, timeout, /, *args, **kwargs):
        answer = plain(rref, rpc_api, func_name, timeout, *args, **kwargs)
        if isinstance(answer, self.torch._C.Future) and not self.known(answer):
            self.know(answer, [[rref.owner_name(), func_name]])
        return answer

    # torch.profiler.record_function

    def enter_block(self, plain, block):
        if block.name in MARKS:
            name = f"step {next(self.steps)}" if block.name == "step" else block.name
            block.bar = self.begin(block.name, name)
        return plain(block)

    def leave_block(self, plain, block, *error):
        if block.name in MARKS and hasattr(block, "bar"):
            self.end(block.bar)
        return plain(block, *error)

    # ------------------------------------------------------------------------------------------ where threads stand

    def is_library(self, path):
        return is_library(path, os.path.dirname(self.torch.__file__))

    def watch(self):
        """Start the thread that writes the .now. Not earlier: a process that forks ranks has one thread."""
        if not self.watched and self.torch:
            self.watched = True
            path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "standing.py")
            spec = importlib.util.spec_from_file_location("rpctrace_standing", path)
            module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
                module.Watcher(self).start()
            except Exception as error:
                self.not_recorded(f"where the threads stand: {error}")


def check(module, path, parameters, version):
    """Raise if this function of torch is not the one that we know."""
    try:
        function = operator.attrgetter(path)(module)
    except AttributeError:
        raise LookupError(f"torch {version} has no {module.__name__}.{path}") from None
    if parameters:
        import inspect  # torch has imported it

        found = tuple(inspect.signature(function).parameters)
        if found != parameters:
            raise LookupError(f"torch {version} has other parameters of {module.__name__}.{path}: {', '.join(found)}")


def put_around(owner, name, ours):
    """Replace owner.name by a function that calls `ours` with the plain function and its arguments."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def function(*args, **kwargs):
        return ours(plain, *args, **kwargs)

    setattr(owner, name, function)


def name_of(message):
    """Return the name of the function or method that a call runs, instead of the helper of torch that runs it."""
    func, args, _ = message
    while isinstance(func, functools.partial):
        func = func.func
    try:  # a callable may answer any attribute, with anything, or raise
        name, module = getattr(func, "__name__", None), getattr(func, "__module__", None)
    except Exception:
        name = module = None
    name = name if isinstance(name, str) else type(func).__name__  # never str(func), which may be slow, or raise
    module = module if isinstance(module, str) else ""
    if module == "torch.distributed.rpc.rref_proxy":  # rref.rpc_sync().method() is _local_invoke(rref, "method")
        return args[1]
    return f"torch.{module.split('.')[2]}.{name}" if module.startswith("torch.distributed.") else name


def number_of(rref):
    found = RREF.search(str(rref))
    return ".".join(found.groups()) if found else ""


def plain_number(value):
    return value if isinstance(value, (int, float)) else None


@functools.lru_cache(4096)
def is_library(path, torch):
    """Return whether a file belongs to torch, to Python, or to us: the reader looks for his own lines."""
    mine = os.path.dirname(os.path.abspath(__file__))
    if path.startswith((torch + os.sep, mine + os.sep, "<frozen")):
        return True
    return path.startswith(os.path.dirname(os.__file__) + os.sep) and "site-packages" not in path


def place_of(frame, is_library):
    """Return the innermost line of the program as "file:line, in function"."""
    while frame and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}" if frame else ""


if __name__ == "sitecustomize" and "RPCTRACE_INTO" in os.environ:
    start_recording()
