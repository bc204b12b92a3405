"""How tests start a program of this repository.

    with Program("rl_rpc/main.py", "--world_size", 3) as running:
        running.wait_for_text("Episode 10", 60)
    done = run_script("rl_rpc/main.py", "--world_size", 1)    # to its end: done.returncode, done.stdout, done.stderr

A program is a fork of a process that has loaded torch already (warm.py), because loading torch takes longer than most
tests. With cold=True it is started as a user starts it, for tests of the start itself. The environment variable COLD=1
makes every program cold, so that a run of all tests shows what a user gets.

RunningJob (jobs.py) starts all ranks of a main.py in one of three ways, and run_in_terminals (tutorials.py) those of a
program in one file. Both start Programs.
"""

import contextlib
import functools
import multiprocessing.connection
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref

from processes import command_of, session_members

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def read_whole(path):
    with open(path, errors="replace") as file:
        return file.read()


class Program:
    """A program that is running. After a `with` block, and after result(), nothing of it is left."""

    def __init__(self, path, *flags, cold=False, by=None, env=None, cwd=None, room=None, stdout=None, stderr=None):
        """`path`: of the program, relative to the repository or absolute. `env`: further environment variables.

        `by`: the words that start it, instead of Python's name alone, such as torchrun's or those of two_hosts.py.
        `stdout`, `stderr`: an open file, if its output is not to be read here. With one of these three it is cold.
        `room`: a file that programs have in common which end together, see warm.leaving_together.
        """
        self.args = [*map(str, by or [sys.executable]), str(ROOT / path), *map(str, flags)]
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.out, self.err = (pathlib.Path(folder, name) for name in ("out", "err"))
        self.out.touch()
        self.err.touch()
        environ = os.environ | {name: str(value) for name, value in (env or {}).items()}
        if cold or by or stdout or stderr or os.environ.get("COLD") == "1":
            with open(self.out, "w") as out, open(self.err, "w") as err:
                streams = {"stdout": stdout or out, "stderr": stderr or err}
                self.process = subprocess.Popen(self.args, **streams, env=environ, cwd=cwd, start_new_session=True)
        else:
            self.process = WarmProcess(self.args, str(self.out), str(self.err), environ, cwd, room)
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def output(self):
        """Return what it has written to stdout so far."""
        return read_whole(self.out)

    def errors(self):
        """Return what it has written to stderr so far."""
        return read_whole(self.err)

    def text(self):
        return self.output() + self.errors()

    @property
    def returncode(self):
        return self.process.returncode

    def poll(self):
        return self.process.poll()

    def wait(self, seconds=120):
        """Wait for its end, and return its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.args} still runs after {seconds} s:\n{self.text()}") from None

    def wait_for_text(self, pattern, seconds=60):
        """Return True when it has printed `pattern`, or False if it has ended without printing it."""
        return wait_for_text([self], pattern, seconds)

    def send_signal(self, number):
        os.kill(self.pid, number)

    def members(self):
        """Return its living processes: itself, and those that it has started directly or indirectly."""
        return session_members(self.pid)

    def kill(self):
        """Kill all its processes."""
        # Python's resource tracker ends by itself, when it has removed the semaphores of the killed processes.
        while living := [pid for pid in self.members() if "resource_tracker" not in command_of(pid)]:
            kill(living)
        self.process.wait()

    def result(self, seconds=120):
        """Wait for its end; return the CompletedProcess, with text."""
        try:
            self.wait(seconds)
        finally:
            self.kill()
        return subprocess.CompletedProcess(self.args, self.returncode, self.output(), self.errors())


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for_text(programs, pattern, seconds):
    """Return True when one of these has printed `pattern`, or False if all have ended without printing it."""
    deadline = time.monotonic() + seconds
    while True:
        ended = all(program.poll() is not None for program in programs)  # before the text is read
        text = "\n".join(program.text() for program in programs)
        if re.search(pattern, text):
            return True
        if ended:
            return False
        assert time.monotonic() < deadline, f"{pattern!r} not printed within {seconds} s:\n{text}"
        time.sleep(0.02)


def run_script(path, *flags, timeout=120, **how):
    """Run a program to its end; return the CompletedProcess. `how`: see Program."""
    return Program(path, *flags, **how).result(timeout)


def run_main(package, *flags, timeout=120, **how):
    """Run a package's main.py to its end; return the CompletedProcess. `how`: see Program."""
    return run_script(f"{package}/main.py", *flags, timeout=timeout, **how)


def run_traced(path, package, *flags):
    """Run a package's main.py under tools/trace.py, which writes the file `path`, and a table to stderr."""
    command = [sys.executable, ROOT / package / "main.py", *flags]
    return run_script("tools/trace.py", path, "--", *command, cold=True)


def start_main(package, *flags, **how):
    """Start a package's main.py; return the Program."""
    return Program(f"{package}/main.py", *flags, **how)


# -------------------------------------------------------------------------------------------------------- warm programs


@functools.cache
def warm_process():
    """Start warm.py once; return the address at which it will wait.

    If a test runs tests, these use the same process, and so do all processes of pytest-xdist (conftest.py).
    """
    if "WARM_PROCESS" in os.environ:
        return os.environ["WARM_PROCESS"]
    address = os.path.join(tempfile.mkdtemp(), "warm")
    command = [sys.executable, str(ROOT / "tests" / "harness" / "warm.py"), address]
    # Keep the Popen, so that its stdin stays open until this process ends.
    warm_process.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    return address


def connect_to_warm_process():
    deadline = time.monotonic() + 120  # it loads torch
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return multiprocessing.connection.Client(warm_process(), "AF_UNIX")
        time.sleep(0.05)
    raise AssertionError("tests/harness/warm.py does not listen")


class WarmProcess:
    """A command that a fork of the warm process runs. It has those methods of a Popen that Program uses."""

    def __init__(self, args, out, err, environ, cwd, room):
        self.args, self.returncode = args, None
        self.connection = connect_to_warm_process()
        request = {"argv": args[1:], "cwd": str(cwd or os.getcwd()), "environ": environ, "room": room and str(room)}
        request["environ"]["WARM_PROCESS"] = warm_process()
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
