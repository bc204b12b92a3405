"""See every RPC of a program that uses torch.distributed.rpc, from both sides, without changing the program.

    python tools/trace.py step.png -- python rl_rpc/tutorial.py --world_size 3 --max_episodes 3
    python tools/trace.py all.json -- torchrun --nproc-per-node 3 rl_rpc/main.py

The command after `--` runs as it does without this program. When it has ended, a table of its calls is printed on
stderr, and the file is written: a .png is a picture of one step, a .json contains everything, for ui.perfetto.dev. If
the command hangs, end it with Ctrl-C: the table shows which calls were not answered.

If you start the ranks one by one, let each of them record into the same folder. Another command draws the folder. If
the ranks are on several hosts, copy their folders into one; the calls show how much the clocks of the hosts differ.
Take a new folder for each run of the job.

    python tools/trace.py --into calls -- python rl_rpc/main.py --world_size 2 --rank 0
    python tools/trace.py --into calls -- python rl_rpc/main.py --world_size 2 --rank 1
    python tools/trace.py step.png calls

A step is a block `with torch.profiler.record_function("step"):` of the program. A block named "wait" is drawn as
waiting. In a program without steps, the picture shows the time from one call of the most frequent kind to the next.
--window chooses another time.

All calls of Python functions are recorded. Three things run in C++ and are not recorded: built-in operators such as
torch.add, functions of TorchScript, and what a server does during a distributed backward pass.

You can copy this file beside any program. It is read in this order: start the command, record in its processes, read
the recordings, draw them.
"""

import contextlib
import functools
import importlib.machinery
import importlib.util
import itertools
import json
import operator
import os
import signal
import socket
import sys
import threading
import time

# In each process of the command, this file is the module `sitecustomize`, and only records (see `run`). Then it imports
# nothing more, because this happens at the start of every Python process.
RECORDS = __name__ == "sitecustomize"
if not RECORDS:
    import argparse
    import bisect
    import collections
    import multiprocessing
    import pathlib
    import shutil
    import statistics
    import subprocess
    import tempfile


# ---------------------------------------------------------------------------------------------- start the command


# If one of these is sent to this process, it is meant for the command.
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def main(words):
    at = words.index("--") if "--" in words else len(words)
    command = words[at + 1 :]
    args = parse(words[:at], command)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # the command inherits that it is ignored, but no handler
            signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that folders are removed
    if not command:
        sys.exit(report(args.folder, args.file, args.window))
    if args.into:
        try:
            status = run(command, args.run)
            is_recorded(read(args.run, most=10))  # a process that cannot be recorded says so in its first lines
        finally:
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(args.run)
        leave(status)
    with tempfile.TemporaryDirectory(prefix="trace-", ignore_cleanup_errors=True) as folder:
        status = run(command, folder)
        failed = report(folder, args.file, args.window)
    leave(status or failed)


def parse(words, command):
    parser = argparse.ArgumentParser(
        usage="trace.py [--window FROM TO] FILE (FOLDER | -- COMMAND)\n       trace.py --into FOLDER -- COMMAND",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="what is written: .png or .json")
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="with recordings, which are drawn")
    parser.add_argument("--into", metavar="FOLDER", help="record into this folder, and draw nothing")
    window_help = "what the picture shows, in milliseconds as in the .json (they begin with torch's own calls)"
    parser.add_argument("--window", nargs=2, type=float, metavar=("FROM", "TO"), help=window_help)
    args = parser.parse_args(words)
    if command:
        complete = bool(args.file) != bool(args.into) and not args.folder
    else:
        complete = args.file and args.folder and not args.into
    if not complete:
        parser.error("give a FILE or --into, and a command after `--`; or a FILE, and a FOLDER with recordings")
    if args.file and (why := why_not_written(args.file, command)):
        parser.error(f"{args.file}: {why}")
    if args.window and not 0 <= args.window[0] < args.window[1] < float("inf"):
        parser.error("--window {:g} {:g}: FROM must be less than TO, and not negative".format(*args.window))
    if args.folder and not os.path.isdir(args.folder):
        parser.error(f"{args.folder}: there is no such folder")
    if args.folder and not recordings(args.folder):
        parser.error(f"{args.folder}: there are no recordings in it")
    if args.into:
        if os.pathsep in os.path.abspath(args.into):
            parser.error(f"--into {args.into}: the path must not contain a colon, because PYTHONPATH cannot contain it")
        try:
            os.makedirs(args.into, exist_ok=True)
            args.run = tempfile.mkdtemp(prefix="run-", dir=args.into)
        except OSError as error:
            parser.error(f"--into {args.into}: {error.strerror}")
    return args


def why_not_written(path, command):
    folder = os.path.dirname(os.path.abspath(path))
    if not path.endswith((".png", ".json")):
        return "the name must end in .png or .json"
    if path.endswith(".png") and not importlib.util.find_spec("matplotlib"):
        return "this needs matplotlib (pip install matplotlib)"
    if not os.path.isdir(folder):
        return "that folder does not exist"
    if not os.access(folder, os.W_OK):
        return "this user may not write in that folder"
    if os.path.realpath(path) in [os.path.realpath(word.partition("=")[2] or word) for word in command]:
        return "the command names this file, too"
    return ""


def run(command, folder):
    """Run a command, whose processes record into `folder`; return its exit status, -n if signal n has killed it.

    Python imports a module `sitecustomize` when it starts, if it finds one on its path. So a copy of this file with
    that name, in a folder that stands first in PYTHONPATH, runs in every Python process that the command starts.
    """
    signal.signal(signal.SIGCHLD, lambda *_: None)  # it comes when the command has ended
    awaited = {*SIGNALS, signal.SIGCHLD}  # blocked, so that sigwait() returns those, too, that are ignored
    plain = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    restore = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, plain)
    with (
        tempfile.TemporaryDirectory(prefix="start-", dir=folder, ignore_cleanup_errors=True) as first,
        start_witness() as witness,
    ):
        shutil.copyfile(__file__, os.path.join(first, "sitecustomize.py"))
        path = os.pathsep.join(filter(None, (os.path.abspath(first), os.environ.get("PYTHONPATH"))))
        try:
            process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, preexec_fn=restore)
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
            sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
        while process.poll() is None:
            number = signal.sigwait(awaited)
            if number in SIGNALS and not witness(number):
                process.send_signal(number)
    for number in SIGNALS:
        take(number)  # if it has come since the command ended
    restore()
    return process.returncode


@contextlib.contextmanager
def start_witness():
    """Start a process; yield a function that says whether this process has received a signal, too.

    A terminal sends Ctrl-C to all processes of a group, so the command has received it already. A signal that this
    process has received alone must be sent to the command. The witness tells one from the other.
    """
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if not pid:
        try:
            ours.close()
            while True:
                theirs.send(take(theirs.recv()))
        finally:
            os._exit(0)  # EOFError: the other side has ended
    theirs.close()

    def witness(number):
        ours.send(number)
        return ours.recv()

    try:
        yield witness
    finally:
        ours.close()
        os.waitpid(pid, 0)


def take(number):
    """Return whether this signal, which is blocked, has come, and forget it."""
    has_come = number in signal.sigpending()
    if has_come:
        signal.sigwait({number})
    return has_come


def leave(status):
    """End this process as the command has ended."""
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


# ------------------------------------------------------------------------------------- record, in every process

# A recording consists of bars. A bar is a period of time on one thread: a call, from its start until its answer; the
# serving of a call; a wait; a step. A process writes a line when a bar begins and another one when it ends, and each
# line goes to the kernel at once. So nothing is lost when the process is killed.

MARKS = {"step", "wait"}  # the names for torch.profiler.record_function
LINES = 200_000  # in a file. A process keeps its last two files, and so at least its last 100,000 bars
TAIL = b"call"  # the end of a message whose call is recorded; before it stands the call's number, 16 bytes
NUMBER = "number of this call in the trace"  # no program has a keyword argument of this name


def start_recording():
    """Called at the start of every Python process of the command."""
    here = os.path.dirname(os.path.abspath(__file__))
    recorder = Recorder(os.path.dirname(here))
    after = {
        "torch.distributed.rpc": recorder.replace_functions,  # `import torch` imports it
        "torch.autograd.profiler": recorder.replace_blocks,
        "torch.distributed.optim": recorder.replace_step,
    }
    sys.meta_path.insert(0, Hook(after))
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
        self.worker = {}  # the name and the rank of this process, once init_rpc has returned
        self.bars, self.calls, self.steps = itertools.count(), itertools.count(), itertools.count(1)
        self.begin_recording()
        os.register_at_fork(after_in_child=self.begin_recording)

    def begin_recording(self):
        self.process = os.urandom(8)  # distinguishes this process from all others, on other hosts as well
        self.file, self.paths, self.lines = None, [], 0
        self.lock = threading.RLock()  # a signal handler may make a call, while its thread is in write()
        # A call passes through several of the methods below, all on the thread that makes it. They exchange these
        # attributes: `call`, its (kind, callee's name); `sent`, its (kind, bar); and `awaited`, the bar of the call for
        # whose answer this thread waits next.
        self.thread = threading.local()

    def begin(self, kind, name, **args):
        """Begin a bar on the current thread, and return its number."""
        bar, tid = next(self.bars), threading.get_ident()
        line = {"begin": bar, "ts": time.time_ns(), "tid": tid, "cat": kind, "name": name, "args": args}
        self.write(json.dumps(line))
        return bar

    def end(self, bar):
        self.write(f'{{"end": {bar}, "ts": {time.time_ns()}}}')  # what json.dumps returns, in a tenth of its time

    def write(self, line):
        try:
            with self.lock:
                if self.lines % LINES == 0:
                    self.open_next_file()
                elif not self.is_open():
                    self.open()
                self.lines += 1
                os.write(self.file, line.encode() + b"\n")
        except OSError as error:  # for example, the disk is full: the program must go on
            self.write = lambda line: None
            if os.path.isdir(self.folder):  # or the command has ended before this process
                print(f"trace.py: process {os.getpid()} is not recorded any more: {error.strerror}", file=sys.stderr)

    def open_next_file(self):
        if self.is_open():
            os.close(self.file)
        name = f"{socket.gethostname()}-{os.getpid()}-{self.process.hex()}.{len(self.paths):04}.jsonl"
        self.paths.append(os.path.join(self.folder, name))
        self.open()
        self.introduce()
        for path in self.paths[-3:-2]:
            os.remove(path)

    def open(self):
        self.file = os.open(self.paths[-1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self.opened = os.fstat(self.file)

    def is_open(self):
        """Return whether our file is still open. A program may close all descriptors, and use their numbers again."""
        try:
            return self.file is not None and os.path.samestat(os.fstat(self.file), self.opened)
        except OSError:
            return False

    def introduce(self):
        """Write who this process is. The last such line of a process counts."""
        place = {"host": socket.gethostname(), "pid": os.getpid(), "main": threading.main_thread().ident}
        os.write(self.file, json.dumps({**place, **self.worker}).encode() + b"\n")

    def replace_functions(self, rpc):
        """Put a function of ours around those of torch that every call and every wait pass through.

        Most have private names, because torch has no public way to see every call. If a later torch lacks one of them,
        the program runs on without being recorded.
        """
        import torch  # it is being imported, and imports this module

        self.torch, self.rpc = torch, rpc
        self.write(json.dumps({"torch": str(torch.__version__)}))
        private = {
            # A call that is made first enters torch's profiler, which has its kind and the worker that is called. Then
            # its function and arguments are packed, and the message is sent.
            "api._enable_rpc_profiler": self.note_call,
            "internal._InternalRPCPickler.serialize": self.pack,
            "api._invoke_rpc_python_udf": self.send,
            "api._invoke_remote_python_udf": self.send,
            # The callee unpacks the message, and runs the function.
            "internal._InternalRPCPickler.deserialize": self.unpack,
            "internal._run_function": self.serve,
            "PyRRef.to_here": self.recorded("wait", "to_here"),
            "init_rpc": self.join,
        }
        for path in private:
            try:
                operator.attrgetter(path)(rpc)
            except AttributeError:
                self.write(json.dumps({"cannot": f"torch {torch.__version__} has no torch.distributed.rpc.{path}"}))
                return
        for path, ours in private.items():
            owner, _, name = path.rpartition(".")
            put_around(operator.attrgetter(owner)(rpc) if owner else rpc, name, ours)
        put_around(torch._C.Future, "wait", self.wait)
        put_around(torch.distributed.autograd, "backward", self.recorded("work", "backward"))

    def replace_blocks(self, profiler):
        put_around(profiler.record_function, "__enter__", self.enter_block)
        put_around(profiler.record_function, "__exit__", self.leave_block)

    def replace_step(self, optim):
        put_around(optim.DistributedOptimizer, "step", self.recorded("work", "optimizer step"))

    # Each of these gets the function that it replaces as `plain`.

    def recorded(self, kind, name):
        """Return a function that records a bar of this kind while the plain one runs."""

        def ours(plain, *args, **kwargs):
            bar = self.begin(kind, name)
            try:
                return plain(*args, **kwargs)
            finally:
                self.end(bar)

        return ours

    def join(self, plain, *args, **kwargs):
        plain(*args, **kwargs)
        me = self.rpc.get_worker_info()
        self.worker = {"worker": me.name, "rank": me.id}
        self.introduce()

    def note_call(self, plain, should_profile, qualified_name, func, rpc_type, worker):
        self.thread.call = rpc_type.value, worker.name
        return plain(should_profile, qualified_name, func, rpc_type, worker)

    def pack(self, plain, pickler, message):
        """Add the number of the call behind the pickle, where a callee that is not recorded does not notice it."""
        call = vars(self.thread).pop("call", None)
        if not call or not isinstance(message, self.rpc.internal.PythonUDF):  # what is packed is an answer
            return plain(pickler, message)
        kind, callee = call
        number = self.process + next(self.calls).to_bytes(8, "big")
        bar = self.begin(kind, name_of(message), to=callee, call=number.hex())
        try:
            data, tensors = plain(pickler, message)
        except BaseException:
            self.end(bar)
            raise
        self.thread.sent = kind, bar
        return data + number + TAIL, tensors

    def send(self, plain, *message):
        kind, bar = vars(self.thread).pop("sent", (None, None))
        try:
            answer = plain(*message)
        except BaseException:
            if kind:
                self.end(bar)
            raise
        if kind == "sync":
            self.thread.awaited = bar  # it ends when the wait that follows ends
        elif kind:
            future = answer._get_future() if kind == "remote" else answer  # remote() returns an RRef
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
        name = name_of(message)
        bar = self.begin("run", name, call=number)
        try:
            result = plain(message)
        finally:
            self.end(bar)
        if isinstance(result, self.torch._C.Future):  # async_execution: the answer leaves when this Future is completed
            held = self.begin("held", name, call=number)
            result.add_done_callback(lambda _: self.end(held))
        return result

    def wait(self, plain, future):
        bar = vars(self.thread).pop("awaited", None)
        if bar is None and future.done():
            return plain(future)
        bar = self.begin("wait", "wait") if bar is None else bar
        try:
            return plain(future)
        finally:
            self.end(bar)

    def enter_block(self, plain, block):
        if block.name in MARKS:
            name = f"step {next(self.steps)}" if block.name == "step" else block.name
            block.bar = self.begin(block.name, name)
        return plain(block)

    def leave_block(self, plain, block, *error):
        if block.name in MARKS:
            self.end(block.bar)
        return plain(block, *error)


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
    name = getattr(func, "__name__", type(func).__name__)  # never str(func), which may be slow, or raise
    module = getattr(func, "__module__", None) or ""
    if module == "torch.distributed.rpc.rref_proxy":  # rref.rpc_sync().method() is _local_invoke(rref, "method")
        return args[1]
    return f"torch.{module.split('.')[2]}.{name}" if module.startswith("torch.distributed.") else name


# ------------------------------------------------------------------------------------------ read the recordings

OF_TORCH = "torch.rpc."  # so begin the names of the RPCs that torch makes by itself
UNFINISHED = " (unfinished)"  # so end the names of bars that had no end when their process ended


def report(folder, path, window):
    """Write the file, and print a table of the calls. Returns the exit status."""
    recorded = read(folder)
    complete = is_recorded(recorded)
    processes = arrange(recorded)
    bars = [bar for process in processes for bar in process["bars"].values()]
    bars.sort(key=lambda bar: (bar["ts"], -bar["dur"]))
    made = [bar for bar in bars if "to" in bar["args"] and not bar["name"].startswith(OF_TORCH)]
    if not made:
        if complete:
            say("no call of a Python function was recorded")
        return 0
    calls = match(bars)
    correct_times(processes, bars, calls)
    print(table(processes, made, calls), file=sys.stderr)
    for process in processes:
        if process["full"]:
            say(f"{process['name']} recorded too many bars; the last {len(process['bars']):,} are kept")
    window = window and [1e3 * milliseconds for milliseconds in window]
    if window and not any(is_within(bar, *window) for bar in made):
        times = [*window, min(bar["ts"] for bar in made), max(map(end_of, made))]
        say("no call is in --window {:g} {:g}: they are from {:.0f} to {:.0f}".format(*(time / 1e3 for time in times)))
    try:
        write(path, lay_out(processes, bars) + arrows(calls), window)
    except OSError as error:
        say(f"{path}: {error.strerror}")
        return 1
    return 0


def is_recorded(recorded):
    """Return whether these processes could be recorded, and say so if not."""
    missing = sorted({process["cannot"] for process in recorded if "cannot" in process})
    for why in missing:
        say(f"nothing was recorded, because {why}")
    if not recorded:
        say("no process of the command has imported torch, or Python was told to ignore this program (-I, -E, -S)")
    return bool(recorded and not missing)


def say(line):
    print(f"trace.py: {line}", file=sys.stderr)


def recordings(folder):
    """Return the paths of the files that were recorded into this folder."""
    return sorted(pathlib.Path(folder).rglob("*.[0-9][0-9][0-9][0-9].jsonl"))


def read(folder, most=None):
    """Return the recorded processes. The "bars" of each are {number: event of Chrome's trace format, but in ns}.

    `most`: how many lines of each file are read.
    """
    processes = {}
    for path in recordings(folder):
        name, number, _ = path.name.rsplit(".", 2)
        process = processes.setdefault(name, {"bars": {}, "run": path.parent})
        process["full"] = int(number) > 1
        with path.open("rb") as file:
            for line in itertools.islice(file, most):
                with contextlib.suppress(ValueError):  # the process was killed while it wrote this line
                    take_in(process, json.loads(line))
    return list(processes.values())


def take_in(process, line):
    if "begin" in line:
        process["bars"][line.pop("begin")] = {"ph": "X", **line}
    elif "end" in line:
        if bar := process["bars"].get(line["end"]):  # or it began in a file that is gone
            bar["dur"] = line["ts"] - bar["ts"]
    else:
        process.update(line)


def arrange(processes):
    """Return the processes that have bars, in the order of their ranks. Give each its "name", and each bar its end."""
    processes = [process for process in processes if process["bars"]]
    starts = {id(process): min(bar["ts"] for bar in process["bars"].values()) for process in processes}
    processes.sort(key=lambda process: (process.get("rank", len(processes)), starts[id(process)]))
    workers = [process.get("worker") for process in processes]
    runs = collections.Counter(
        worker for worker, _ in {(process.get("worker"), process["run"]) for process in processes}
    )
    if again := sorted(worker for worker, count in runs.items() if worker and count > 1):
        say(f"several runs are drawn as if they were one ({', '.join(again)}): record each into a new folder")
    times = [end_of(bar) for process in processes for bar in process["bars"].values()] or [0]
    end = max(times) + (max(times) - min(times)) // 20  # of all unfinished bars: so nested ones are nested in the file
    for number, (process, worker) in enumerate(zip(processes, workers, strict=True)):
        if not worker:  # init_rpc has not returned
            process["name"] = f"process {process['pid']}"
        elif workers.count(worker) > 1:  # the job was started again
            process["name"] = f"{worker} process {process['pid']}"
        else:
            process["name"] = worker
        for bar in process["bars"].values():
            bar["pid"] = number
            if "dur" not in bar:
                bar |= {"dur": end - bar["ts"], "name": bar["name"] + UNFINISHED}
    return processes


def end_of(bar):
    return bar["ts"] + bar.get("dur", 0)


def is_within(bar, start, end):
    """Return whether a part of this bar is between the two times."""
    return bar["ts"] < end and end_of(bar) > start


def is_finished(bar):
    return not bar["name"].endswith(UNFINISHED)


def match(bars):
    """Return (call, run, answered) for each call that was recorded at the caller and at the callee.

    `call` is the caller's bar, `run` the callee's. The answer leaves at the end of `answered`: this is `run`, or the
    bar of a Future that was completed after `run`.
    """
    made, served, held = {}, {}, {}  # number of the call -> bar
    for bar in bars:
        found = made if "to" in bar["args"] else {"run": served, "held": held}.get(bar["cat"])
        if found is not None:
            found[bar["args"]["call"]] = bar
    return [(made[number], run, held.get(number, run)) for number, run in served.items() if number in made]


def correct_times(processes, bars, calls):
    """Put the bars of all hosts on one time axis, in microseconds since the first bar, as the file format demands."""
    clocks = line_up(calls, [process["host"] for process in processes])
    for bar in bars:
        bar["ts"] += clocks[processes[bar["pid"]]["host"]][0]
    zero = min(bar["ts"] for bar in bars)
    for bar in bars:
        bar |= {"ts": (bar["ts"] - zero) / 1e3, "dur": bar["dur"] / 1e3}
    for host, (shift, error) in clocks.items():
        if error:
            say(f"the clock of {host} was corrected by {shift / 1e6:+.3f} ms (error at most {error / 1e6:.3f} ms)")


def line_up(calls, hosts):
    """Return {host: (nanoseconds to add to its clock, the largest error of this correction)}.

    `hosts`: the host of each process. The clock of the first host is taken as correct. A call is served after it was
    sent, and before its answer arrives. So each call gives a lower and an upper bound for the difference of two clocks.
    """
    bounds = {}  # (host, other host) -> (lowest, highest) number to add to the other's clock
    for call, run, answered in calls:
        if not (is_finished(call) and is_finished(answered)):
            continue
        one, other = hosts[call["pid"]], hosts[run["pid"]]
        low, high = call["ts"] - run["ts"], end_of(call) - end_of(answered)
        for pair, least, most in (((one, other), low, high), ((other, one), -high, -low)):
            lowest, highest = bounds.get(pair, (least, most))
            bounds[pair] = max(lowest, least), min(highest, most)
    clocks = {hosts[0]: (0, 0)}
    for _ in hosts:  # repeated, to reach hosts that have no calls with the first one
        for (one, other), (low, high) in bounds.items():
            if one in clocks and other not in clocks:
                shift, error = clocks[one]
                clocks[other] = shift + (low + high) // 2, error + abs(high - low) // 2
    return dict.fromkeys(hosts, (0, 0)) | clocks


def table(processes, made, calls):
    """Return a table with a line for each caller, callee and function. `made`: the callers' bars.

    Columns: the number of calls, and medians in milliseconds: of the whole call at the caller, of its part on the wire
    and in queues, and of its part at the callee. If calls were not answered, their number follows.
    """
    counts, unanswered, times = collections.Counter(), collections.Counter(), collections.defaultdict(list)
    for bar in made:
        counts[title_of(processes, bar)] += 1
        unanswered[title_of(processes, bar)] += not is_finished(bar)
    for call, run, answered in calls:
        if is_finished(call) and is_finished(answered):
            at_callee = end_of(answered) - run["ts"]
            times[title_of(processes, call)].append((call["dur"], call["dur"] - at_callee, at_callee))
    width = max(26, *map(len, counts))
    lines = [f"{'RPCs, median milliseconds':<{width}}   calls   at caller  wire, queue   at callee"]
    for title, count in sorted(counts.items()):
        medians = [statistics.median(column) / 1e3 for column in zip(*times[title], strict=True)]
        line = f"{title:<{width}}{count:>8,}" + "".join(f"{median:>12.3f}" for median in medians)
        lines.append(f"{line}   {unanswered[title]:,} unanswered" if unanswered[title] else line)
    one_sided = len(made) - sum(not call["name"].startswith(OF_TORCH) for call, _, _ in calls)
    if one_sided:
        lines.append(f"Recorded at the caller only: {one_sided:,} of these calls.")
    return "\n".join(lines)


def title_of(processes, call):
    return f"{processes[call['pid']]['name']} -> {call['args']['to']}: {call['name'].removesuffix(UNFINISHED)}"


# ------------------------------------------------------------------------------------------------------- draw them

# The picture has a lane for each thread, dark while the thread works and pale while it waits, and arrows for the
# messages between the lanes. The .json has the same lanes and arrows.

LANES = ("main thread", "calls in flight", "RPC thread", "answers owed")  # the groups of a process's lanes, from above
NO_THREAD = {"async": LANES[1], "remote": LANES[1], "held": LANES[3]}  # kinds of bars during which no thread waits
COLORS = {"waiting": "#c6dbec", "working": "#1d5b8c", "backward": "#7aa6c8"}  # of bars
STATES = {"run": "working", "step": "working", "work": "working"}  # by a bar's kind
MESSAGE_COLORS = ("#000000", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # of calls and answers, by the caller
MOST_CALLS = 60  # in one picture


def write(path, events, window):
    if path.endswith(".json"):
        with open(path, "w") as file:
            file.write('{"traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n")
    else:
        draw(path, events, window)


def lay_out(processes, bars):
    """Return the bars with a lane as their "tid", and events that name the lanes.

    A thread keeps its lane until its outermost bar ends; then the lane is free. So an RPC thread has no lane of its
    own, because it does not matter which thread serves a call.
    """
    lanes = collections.defaultdict(list)  # (process, group) -> for each lane: (its thread, when that lane is free)
    labels = {(n, None): label("process_name", n, 0, process["name"]) for n, process in enumerate(processes)}
    for bar in bars:
        number = bar["pid"]
        group = NO_THREAD.get(bar["cat"]) or LANES[0 if bar["tid"] == processes[number]["main"] else 2]
        thread = id(bar) if bar["cat"] in NO_THREAD else bar["tid"]
        lane = lane_for(bar, thread, lanes[number, group])
        bar["tid"] = 100 * LANES.index(group) + lane
        text = f"{group} {lane + 1}" if lane else group
        labels.setdefault((number, bar["tid"]), label("thread_name", number, bar["tid"], text))
    return [*labels.values(), *bars]


def lane_for(bar, thread, lanes):
    """Return the number of the lane that the thread has, or else of the first that is free."""
    for number, (owner, until) in enumerate(lanes):
        if owner == thread and until > bar["ts"]:
            return number
    for number, (_, until) in enumerate(lanes):
        if until <= bar["ts"]:
            lanes[number] = thread, end_of(bar)
            return number
    lanes.append((thread, end_of(bar)))
    return len(lanes) - 1


def label(kind, process, lane, name):
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def arrows(calls):
    """Return the events of an arrow for each call, and of one for its answer, whose number is odd."""
    events = []
    for number, (call, run, answered) in enumerate(calls):
        events += arrow(2 * number, call["name"], (call, call["ts"]), (run, run["ts"]))
        if is_finished(call) and is_finished(answered):
            # 1 ns before its end, an arrow's end is still inside the bar.
            left, arrived = end_of(answered) - 1e-3, end_of(call) - 1e-3
            events += arrow(2 * number + 1, call["name"], (answered, left), (call, arrived))
    return events


def arrow(number, name, tail, tip):
    """`tail` and `tip`: (a bar, a moment at which it exists)."""
    both = {"id": number, "name": name, "cat": "message", "bp": "e"}
    return [
        both | {"ph": phase, "pid": bar["pid"], "tid": bar["tid"], "ts": moment}
        for phase, (bar, moment) in (("s", tail), ("f", tip))
    ]


def draw(path, events, window):
    from matplotlib.figure import Figure  # a second to import, so only when asked for

    start, end = window or typical_period(events)
    figure = Figure((10, 1), layout="constrained")
    axes = figure.subplots()
    draw_period(axes, events, start, end)
    axes.set_xlabel("milliseconds", fontsize=8)
    figure.set_figheight(0.28 * len(axes.get_yticks()) + 1.1)
    figure.legend(handles=legend(), loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110, format="png")


def typical_period(events):
    """Return (start, end) of what is drawn: of all steps, the one of median length. At most MOST_CALLS calls."""
    bars = [event for event in events if event["ph"] == "X" and not event["name"].startswith(OF_TORCH)]
    calls = [bar for bar in bars if "to" in bar["args"]]
    periods = [(bar["ts"], end_of(bar)) for bar in bars if bar["cat"] == "step"]
    if not periods and len(calls) <= MOST_CALLS:
        return calls[0]["ts"], max(map(end_of, calls))
    if not periods:
        kinds = collections.defaultdict(list)  # (caller, callee, function) -> these calls
        for call in calls:
            kinds[call["pid"], call["args"]["to"], call["name"]].append(call)
        frequent = max(kinds.values(), key=len)
        starts = [call["ts"] for call in frequent]
        for call in frequent:  # if calls overlap, a period ends with the first that begins after the end of its call
            following = bisect.bisect_left(starts, end_of(call))
            periods.append((call["ts"], starts[following] if following < len(starts) else end_of(call)))
    periods.sort(key=lambda period: period[1] - period[0])
    start, end = periods[len(periods) // 2]
    within = [call["ts"] for call in calls if start <= call["ts"] < end]
    return start, min(within[MOST_CALLS:], default=end)


def draw_period(axes, events, start, end):
    """Draw the bars from `start` to `end`, in microseconds, and the messages that leave then.

    Lanes that only wait are left out, and so are torch's internal RPCs.
    """
    bars = [bar for bar in events if bar["ph"] == "X" and is_within(bar, start, end)]
    bars = [bar for bar in bars if not bar["name"].startswith(OF_TORCH)]
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    messages = [(tail, heads[tail["id"]]) for tail in events if tail["ph"] == "s" and start <= tail["ts"] < end]
    messages = [message for message in messages if not message[0]["name"].startswith(OF_TORCH)]
    busy = {lane_of(bar) for bar in bars if state_of(bar) != "waiting"}
    lanes = sorted(busy.union(lane_of(event) for message in messages for event in message), reverse=True)
    rows = {lane: row for row, lane in enumerate(lanes)}
    draw_bars(axes, [bar for bar in bars if lane_of(bar) in rows], rows, start, end)
    for tail, head in messages:
        caller = (head if tail["id"] % 2 else tail)["pid"]
        arrow = {"arrowstyle": "-|>", "linewidth": 0.9, "mutation_scale": 6, "shrinkA": 0, "shrinkB": 0}
        arrow["color"] = MESSAGE_COLORS[caller % len(MESSAGE_COLORS)]
        tip, origin = (((event["ts"] - start) / 1e3, rows[lane_of(event)]) for event in (head, tail))
        axes.annotate("", tip, origin, arrowprops=arrow, annotation_clip=False)
    names = {(event["name"], *lane_of(event)): event["args"]["name"] for event in events if event["ph"] == "M"}
    labels = [f"{names['process_name', rank, 0]}, {names['thread_name', rank, lane]}" for rank, lane in lanes]
    axes.set_yticks(range(len(lanes)), labels)
    axes.set(xlim=(0, (end - start) / 1e3), ylim=(-0.6, len(lanes) - 0.4))
    axes.tick_params(labelsize=7)


def draw_bars(axes, bars, rows, start, end):
    """Draw the bars, with a name in each that has room for it."""
    paper = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6}
    letter = 7e-5 * (end - start) / axes.figure.get_figwidth()  # about the width of a letter, in milliseconds
    for bar in bars:
        left, length = (bar["ts"] - start) / 1e3, bar["dur"] / 1e3
        color = COLORS[state_of(bar)]
        axes.barh(rows[lane_of(bar)], length, 0.7, left, color=color, edgecolor="white", linewidth=0.2)
    taken = collections.defaultdict(list)  # row -> (left, right) of each name in it
    for bar in sorted(bars, key=lambda bar: bar["ts"] < start):  # a bar that began before `start` gives way to others
        row, left, right = rows[lane_of(bar)], max(bar["ts"] - start, 0) / 1e3, (min(end_of(bar), end) - start) / 1e3
        end_of_name = left + letter * (len(bar["name"]) + 1)
        if end_of_name < right and all(end_of_name <= begin or over <= left for begin, over in taken[row]):
            taken[row].append((left, end_of_name))
            axes.text(left, row, f" {bar['name']}", fontsize=6.5, va="center", clip_on=True, bbox=paper)


def legend():
    from matplotlib.patches import Patch

    return [Patch(color=color, label=state) for state, color in COLORS.items()]


def lane_of(event):
    """Return (rank, number of the lane within the rank)."""
    return event["pid"], event["tid"]


def state_of(bar):
    """Return what the thread does during this bar: a key of COLORS."""
    # The name of a call is the program's: its function may be called "backward", too.
    return "backward" if (bar["cat"], bar["name"]) == ("work", "backward") else STATES.get(bar["cat"], "waiting")


if RECORDS:
    start_recording()
elif __name__ == "__main__":
    main(sys.argv[1:])
