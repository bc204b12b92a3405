"""What the tests share: run a package's commands as a user does, and import a package's modules."""

import contextlib
import functools
import importlib.util
import json
import multiprocessing.connection
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
NOISE = r"Traceback|Exception raised from|^frame #"  # tracebacks of Python and of C++
PACKAGES = ("rl_rpc", "rnn_rpc", "ddp_rpc", "param_server")
PAGES = [
    path for pattern in ("*.md", "docs/**/*.md", *(f"{name}/*.md" for name in PACKAGES)) for path in ROOT.glob(pattern)
]


def run_script(path, *flags, timeout=120, env=None):
    """Run `python path flags` (path relative to the repository) to its end; return the CompletedProcess (text).

    Without `env` the command is a fork of a process that has imported torch already, see warm.py.
    """
    command = [sys.executable, str(ROOT / path), *map(str, flags)]
    # The output goes to files. A pipe would stay open until Python's fork server has ended too, a second later.
    with tempfile.NamedTemporaryFile("r+") as out, tempfile.NamedTemporaryFile("r+") as err:
        if env is None:
            status = run_warm(command, out.name, err.name, timeout)
        else:
            done = subprocess.run(command, stdout=out, stderr=err, timeout=timeout, env={**os.environ, **env})
            status = done.returncode
        return subprocess.CompletedProcess(command, status, read_whole(out.name), read_whole(err.name))


def read_whole(path):
    with open(path, errors="replace") as file:
        return file.read()


@functools.cache
def warm_process():
    """Start warm.py once; return the address at which it waits. If a test runs tests, these use the same process."""
    if "WARM_PROCESS" in os.environ:
        return os.environ["WARM_PROCESS"]
    address = os.path.join(tempfile.mkdtemp(), "warm")
    command = [sys.executable, str(ROOT / "tests" / "harness" / "warm.py"), address]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "warm\n"
    warm_process.process = process  # keep the Popen, so that its stdin stays open until this process ends
    return address


class WarmCommand:
    """A command that a fork of the warm process runs. It has those methods of a Popen that the tests use."""

    def __init__(self, command, out, err, cwd=None, env=None, room=None):
        """`out`, `err`: paths of the files for its output. `env`: further variables of its environment.

        `room`: a path that commands share which end together, see warm.leaving_together.
        """
        self.args = command
        self.returncode = None
        self.connection = multiprocessing.connection.Client(warm_process(), "AF_UNIX")
        environ = os.environ | {"WARM_PROCESS": warm_process()} | (env or {})
        request = {"argv": command[1:], "cwd": cwd or os.getcwd(), "environ": environ, "room": room}
        self.connection.send(request | {"stdout": out, "stderr": err})
        self.pid = self.connection.recv()

    def wait(self, timeout=None):
        if self.returncode is None:
            if not self.connection.poll(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self.connection.recv()
            self.connection.close()
        return self.returncode

    def poll(self):
        return self.wait(0) if self.returncode is not None or self.connection.poll() else None

    def send_signal(self, number):
        os.kill(self.pid, number)


def run_warm(command, out, err, timeout, cwd=None):
    """Let a fork of the warm process run `command`; return its exit status."""
    process = WarmCommand(command, out, err, cwd)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.connection.close()
        raise subprocess.TimeoutExpired(command, timeout, read_whole(out), read_whole(err)) from None


def run_main(package, *flags, timeout=120, env=None):
    """Run `python <package>/main.py flags` to its end."""
    return run_script(f"{package}/main.py", *flags, timeout=timeout, env=env)


def run_on_pretend_device(package, *flags, timeout=120):
    """Like run_main, but the ranks that compute use the pretend device."""
    return run_script("tests/harness/pretend_main.py", package, *flags, timeout=timeout)


def start_main(package, *flags, env=None, **popen):
    """Start `python <package>/main.py flags` in a new session; return the Popen, with text pipes."""
    command = [sys.executable, str(ROOT / package / "main.py"), *map(str, flags)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(env or {})},
        **popen,
    )


def calls_in_steps(path, name):
    """Return how many RPCs the rank of this name made and served during its steps, from the file of --trace.

    A call of the rank to itself counts once, and torch's internal calls are left out.
    """
    events = json.loads(path.read_text())["traceEvents"]
    named = [event for event in events if event["name"] == "process_name"]
    (rank,) = (event["pid"] for event in named if event["args"]["name"] == name)
    bars = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
    steps = [(bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if bar["cat"] == "step"]
    calls = [bar for bar in bars if bar["cat"] == "run" or bar["args"].get("to", name) != name]
    times = [bar["ts"] for bar in calls if not bar["name"].startswith("torch.rpc.")]
    return sum(start <= time < end for time in times for start, end in steps)


def assert_one_line_error(done, status, *words):
    """Assert that the run ended with this status, without a traceback, and that one line contains all `words`."""
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    assert not re.search(NOISE, done.stderr), done.stderr
    # If several ranks were running, each other rank adds a line that it has lost the rank that failed.
    lines = done.stderr.strip().splitlines()
    assert any(all(word in line for word in words) for line in lines), (words, done.stderr)


def assert_refused(package, flags, capsys, *words):
    """Assert that parse_args of main.py refuses these flags with status 2 and one line that contains all `words`."""
    with package_on_path(package), pytest.raises(SystemExit) as refused:
        import main

        main.parse_args([str(flag) for flag in flags])
    (complaint,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2 and all(word in complaint for word in words), complaint


@contextlib.contextmanager
def package_on_path(package):
    """Allow `import main` and the like from this package; remove its modules from sys.modules afterwards.

    They must be removed because all packages have modules of the same names.
    """
    folder = str(ROOT / package)
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
                del sys.modules[name]


def load_bench(package):
    """Import bench/<package>.py."""
    with package_on_path(package):
        before = sys.path[:]
        sys.path.insert(0, str(ROOT / "bench"))
        try:
            return load_module(ROOT / "bench" / f"{package}.py")
        finally:
            sys.path[:] = before


def load_module(path):
    """Import one file by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchor_of(heading):
    """Return the anchor that GitHub gives to a heading of a page."""
    text = re.sub(r"\]\([^)]*\)", "", heading)  # of a link, only the label counts
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
