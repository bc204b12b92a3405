"""How tests start a program of this repository: as a user does, in a process of its own.

CONTRIBUTING.md has examples. RunningJob (jobs.py) starts all ranks of a main.py in one of three ways, run_in_terminals
(tutorials.py) those of a program in one file, as forks of one process, and TwoHosts (two_hosts.py) puts them on two
hosts. All of these start Programs. A program that misbehaves is one that a function of the test has changed
(patches.py).
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

from processes import command_of, marked, wait_until

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


class Programs:
    """Programs that run at the same time. After a `with` block nothing of them is left."""

    def __init__(self, programs):
        self.processes = list(programs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()

    def output(self):
        """Return what they have written to stdout so far."""
        return "".join(process.out.read_text(errors="replace") for process in self.processes)

    def errors(self):
        """Return what they have written to stderr so far."""
        return "".join(process.err.read_text(errors="replace") for process in self.processes)

    def text(self):
        return "".join(process.output() + process.errors() for process in self.processes)

    def have_ended(self):
        return None not in [process.poll() for process in self.processes]

    def wait(self, seconds=120):
        """Wait for their end, and return their exit statuses."""
        wait_until(self.have_ended, seconds, self.text)
        return [process.returncode for process in self.processes]

    def wait_for_text(self, pattern, seconds=60):
        """Return True when one of them has printed `pattern`, or False if all have ended without printing it."""

        def is_printed():
            return bool(re.search(pattern, self.text()))

        wait_until(lambda: self.have_ended() or is_printed(), seconds, self.text)
        return is_printed()

    def members(self):
        """Return the living processes: of these programs, and those that they have started directly or indirectly."""
        return [pid for process in self.processes for pid in marked(process.mark)]

    def left_over(self, seconds=5):
        """Return those of their processes that do not end within `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left


class Program(Programs):
    """A program that is running. After a `with` block, and after result(), nothing of it is left.

    It also has what subprocess.Popen has, such as pid, returncode, poll() and send_signal().
    """

    def __init__(self, path, *flags, by=None, env=None, cwd=None, stdout=None, stderr=None):
        """`path`: of the program, relative to the repository or absolute. `env`: further environment variables.

        `by`: the words that start it, instead of Python's name alone, such as torchrun's or those of two_hosts.py.
        `stdout`, `stderr`: an open file, if its output is not to be read here.
        """
        super().__init__([self])
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.out, self.err = (pathlib.Path(folder, name) for name in ("out", "err"))
        # All processes that it starts inherit this variable, in whatever session they are.
        mark = {"STARTED_BY_TEST": secrets.token_hex(8)}
        self.mark = f"STARTED_BY_TEST={mark['STARTED_BY_TEST']}"
        args = [*map(str, by or [sys.executable]), str(ROOT / path), *map(str, flags)]
        environ = os.environ | mark | {name: str(value) for name, value in (env or {}).items()}
        with open(self.out, "w") as out, open(self.err, "w") as err:
            streams = {"stdout": stdout or out, "stderr": stderr or err}
            self.process = subprocess.Popen(args, **streams, env=environ, cwd=cwd, start_new_session=True)

    def __getattr__(self, name):
        return getattr(self.process, name)

    def wait(self, seconds=120):
        """Wait for its end, and return its exit status."""
        return super().wait(seconds)[0]

    def kill(self):
        """Kill all its processes."""
        # Python's resource tracker ends by itself, when it has removed the semaphores of the killed processes.
        while living := [pid for pid in self.members() if "resource_tracker" not in command_of(pid)]:
            kill(living)
        self.process.wait()

    def result(self, seconds=120):
        """Wait for its end, after which no process of it may be left; return the CompletedProcess, with text."""
        with self:
            self.wait(seconds)
            left = {pid: command_of(pid) for pid in self.left_over()}
            assert not left, f"{self.args} has ended, but not {left}:\n{self.text()}"
        return subprocess.CompletedProcess(self.args, self.returncode, self.output(), self.errors())


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run_script(path, *flags, timeout=120, **how):
    """Run a program to its end; return the CompletedProcess. `how`: see Program."""
    return Program(path, *flags, **how).result(timeout)


def run_main(package, *flags, timeout=120, **how):
    """Run a package's main.py to its end; return the CompletedProcess. `how`: see Program."""
    return run_script(f"{package}/main.py", *flags, timeout=timeout, **how)
