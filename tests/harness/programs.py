"""How tests start a program of this repository: as a user does, in a process of its own.

    with Program("rl_rpc/main.py", "--world_size", 3) as running:
        running.wait_for_text("Episode 10")
    done = run_script("docs/primer.py")              # to its end: done.returncode, done.stdout, done.stderr
    done = run_main("rl_rpc", "--world_size", 1)     # the same for a package's main.py

RunningJob (jobs.py) starts all ranks of a main.py in one of three ways, run_in_terminals (tutorials.py) those of a
program in one file, as forks of one process, and TwoHosts (two_hosts.py) puts them on two hosts. All of these start
Programs. A program that misbehaves is one that a function of the test has changed (patches.py).

A start costs 3 to 5 seconds of CPU time, so a test asks one program several questions. The number of starts is printed
after the tests.
"""

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref

from processes import command_of, marked

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Program:
    """A program that is running. After a `with` block, and after result(), nothing of it is left."""

    def __init__(self, path, *flags, by=None, env=None, cwd=None, stdout=None, stderr=None):
        """`path`: of the program, relative to the repository or absolute. `env`: further environment variables.

        `by`: the words that start it, instead of Python's name alone, such as torchrun's or those of two_hosts.py.
        `stdout`, `stderr`: an open file, if its output is not to be read here.
        """
        count_a_start()
        self.args = [*map(str, by or [sys.executable]), str(ROOT / path), *map(str, flags)]
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.out, self.err = (pathlib.Path(folder, name) for name in ("out", "err"))
        # All processes that it starts inherit this variable, in whatever session they are.
        mark = {"STARTED_BY_TEST": secrets.token_hex(8)}
        environ = os.environ | mark | {name: str(value) for name, value in (env or {}).items()}
        self.mark = f"STARTED_BY_TEST={mark['STARTED_BY_TEST']}"
        with open(self.out, "w") as out, open(self.err, "w") as err:
            streams = {"stdout": stdout or out, "stderr": stderr or err}
            self.process = subprocess.Popen(self.args, **streams, env=environ, cwd=cwd, start_new_session=True)
        self.pid = self.process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def output(self):
        """Return what it has written to stdout so far."""
        return self.out.read_text(errors="replace")

    def errors(self):
        """Return what it has written to stderr so far."""
        return self.err.read_text(errors="replace")

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
        return marked(self.mark)

    def left_over(self, seconds=5):
        """Return those of its processes that do not end within `seconds`."""
        return left_over([self], seconds)

    def kill(self):
        """Kill all its processes."""
        # Python's resource tracker ends by itself, when it has removed the semaphores of the killed processes.
        while living := [pid for pid in self.members() if "resource_tracker" not in command_of(pid)]:
            kill(living)
        self.process.wait()

    def result(self, seconds=120):
        """Wait for its end, after which no process of it may be left; return the CompletedProcess, with text."""
        try:
            self.wait(seconds)
            left = {pid: command_of(pid) for pid in self.left_over()}
            assert not left, f"{self.args} has ended, but not {left}:\n{self.text()}"
        finally:
            self.kill()
        return subprocess.CompletedProcess(self.args, self.returncode, self.output(), self.errors())


def count_a_start():
    """Add a line to the file whose lines conftest.py counts after the tests."""
    if path := os.environ.get("COUNT_OF_STARTS"):  # not in tools/
        with open(path, "a") as file:
            file.write(os.environ.get("PYTEST_CURRENT_TEST", "") + "\n")


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def left_over(programs, seconds=5):
    """Return the processes of these programs that do not end within `seconds`."""
    deadline = time.monotonic() + seconds
    while left := [pid for program in programs for pid in program.members()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


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
