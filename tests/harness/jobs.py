"""Whole jobs for the lifecycle tests: start one in any of the three ways, find its ranks, wait for its end."""

import contextlib
import importlib.metadata
import os
import random
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time

from helpers import ROOT

# Per package: roles by rank; flags of a run that goes on until it is ended, and of one that ends by itself within
# seconds; what a rank prints once training is under way, and when its work is done.
JOBS = {
    "rl_rpc": {
        "names": ["agent", "observer1", "observer2"],
        "size": ["--world_size", "3"],
        "long": ["--max_episodes", "1000000", "--reward_threshold", "1e9"],
        "short": ["--max_episodes", "20", "--eval_episodes", "1"],
        "training": r"Episode \d+",
        "done": r"Greedy policy over",
    },
    "rnn_rpc": {
        "names": ["ps", "trainer"],
        "size": ["--world_size", "2"],
        "long": ["--epochs", "100000", "--corpus_tokens", "20000"],
        "short": ["--epochs", "2", "--corpus_tokens", "20000"],
        "training": r"(?i)epoch\s+\d+",
        "done": r"(?i)epoch\s+2\b",
    },
    "ddp_rpc": {
        "names": ["trainer0", "trainer1", "master", "ps"],
        "size": ["--world_size", "4"],
        "long": ["--epochs", "1000000"],
        "short": ["--epochs", "2", "--batches", "20"],
        "training": r"(?i)epoch\s+\d+",
        "done": r"(?i)epoch\s+2\b",
    },
    "param_server": {
        "names": ["parameter_server", "trainer_1", "trainer_2"],
        "size": ["--world_size", "3"],
        "long": ["--dataset", "synthetic", "--epochs", "100000", "--log_interval", "10"],
        "short": ["--dataset", "synthetic", "--max_batches", "10"],
        "training": r"training batch",
        "done": r"Accuracy",
    },
}
WAYS = ("spawned", "terminals", "torchrun")


def free_port():
    """Return a port on which nobody listens, below those that the system gives to connections meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def fill_with_traps(folder):
    """Fill `folder` with a file for each name of a module that a job may import; one that is imported leaves a trace.

    A job that is started in this folder must import none of them: they are the user's own, and only named like ours.
    """
    ours = {path.stem for package in JOBS for path in (ROOT / package).iterdir()}
    installed = set(importlib.metadata.packages_distributions())
    for name in filter(str.isidentifier, ours | installed | sys.stdlib_module_names):
        (folder / f"{name}.py").write_text("open(__file__ + '.executed', 'w').close()\n")
    assert (folder / "main.py").exists() and (folder / "glue.py").exists() and (folder / "torch.py").exists()


def executed_traps(folder):
    """Return the names of the files that have been imported since fill_with_traps."""
    return sorted(path.name.partition(".")[0] for path in folder.glob("*.executed"))


class Job:
    """One job: start it, then kill what you like.  Use as a context manager: nothing of it survives the block."""

    def __init__(
        self,
        package,
        way,
        flags,
        fault=None,
        other_hostname=False,
        runner_flags=(),
        env=None,
        only=None,
        script=None,
        cwd=None,
    ):
        """`fault`: (rank, kind, seconds), see faulty_main.py; `env`: more variables; `only`: ranks to start.

        `script`: run this instead of the package's main.py; `cwd`: in this folder.
        """
        self.package, self.way = package, way
        self.names = JOBS[package]["names"]
        script = [script or str(ROOT / package / "main.py")]
        if fault:
            script = [str(ROOT / "tests" / "harness" / "faulty_main.py"), package, *map(str, fault)]
        base = [*script, *JOBS[package]["size"], *flags]
        port = self.port = str(free_port())
        if way == "spawned":
            commands = [[sys.executable, *base]]
        elif way == "terminals":
            place = ["--master_port", port, "--rank"]
            ranks = range(len(self.names)) if only is None else only
            commands = [[sys.executable, *base, *place, str(rank)] for rank in ranks]
        else:
            torchrun = os.path.join(sysconfig.get_path("scripts"), "torchrun")
            here = ["--master-port", port, "--nproc-per-node", str(len(self.names))]
            commands = [[torchrun, *here, *runner_flags, *base]]
        if other_hostname and os.geteuid() == 0:  # a host whose own name does not resolve to loopback
            rename = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere.invalid; exec "$@"', "sh"]
            commands = [[*rename, *command] for command in commands]
        self.folder = tempfile.TemporaryDirectory()
        self.outputs, self.processes = [], []  # outputs: stdout and stderr of each process in turn
        for number, command in enumerate(commands):
            streams = [open(os.path.join(self.folder.name, f"{number}.{name}"), "w+") for name in ("out", "err")]
            environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {})
            self.outputs += streams
            out, err = streams
            process = subprocess.Popen(
                command, stdout=out, stderr=err, start_new_session=True, env=environment, cwd=cwd
            )
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            for pid in self.members(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        for output in self.outputs:
            output.close()
        self.folder.cleanup()

    def text(self, outputs=None):
        """Return everything that all processes have printed so far."""
        parts = []
        for output in self.outputs if outputs is None else outputs:
            with open(output.name, errors="replace") as file:
                parts.append(file.read())
        return "\n".join(parts).strip()

    def errors(self):
        """Return what all processes have written to stderr so far."""
        return self.text(self.outputs[1::2])

    def wait_for_text(self, pattern, seconds):
        """Return True once the job has printed `pattern`, False if it ended without."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text()):
            if all(process.poll() is not None for process in self.processes):
                return bool(re.search(pattern, self.text()))
            assert time.monotonic() < deadline, f"{pattern!r} not printed within {seconds} s:\n{self.text()}"
            time.sleep(0.05)
        return True

    def wait_for_file(self, path, seconds):
        """Return as soon as there is such a file."""
        deadline = time.monotonic() + seconds
        while not os.path.exists(path):
            assert time.monotonic() < deadline, f"no {path} after {seconds} s:\n{self.text()}"
            time.sleep(0.02)

    def pid_of(self, rank, seconds=60):
        """Return the process of a rank, as soon as all are there; None if the job has ended before.

        One child of the fork server alone may be a command that loading torch starts, a moment after its fork.
        """
        if self.way == "terminals":
            return self.processes[rank].pid
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.processes[0].poll() is None:
            if self.way == "torchrun":
                found = [pid for pid in self.members(self.processes[0]) if f"RANK={rank}" in environment_of(pid)]
            else:
                ranks = ranks_of(self.processes[0].pid)
                found = ranks[rank : rank + 1] if len(ranks) >= len(self.names) else []
            if found:
                return found[0]
            time.sleep(0.02)
        return None

    def wait(self, seconds):
        """Wait until every started process has ended; return their exit statuses.  Fails after `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            if self.is_stopped(process.pid):  # by the test (SIGSTOP), in a terminal of its own: it never ends
                continue
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running after {seconds} s:\n{self.text()}") from None
        return [process.returncode for process in self.processes]

    @staticmethod
    def is_stopped(pid):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
        return False

    def members(self, process):
        """Return the live processes that one started process has brought up, itself included."""
        members = session_members(process.pid)
        if self.way == "torchrun":  # it puts each rank into a session of its own; all know the port where they meet
            everyone = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
            members += [pid for pid in everyone if f"MASTER_PORT={self.port}" in environment_of(pid)]
        return members

    def survivors(self, seconds=5):
        """Return the processes of this job that are left (Python's own helper processes take a moment to notice)."""
        deadline = time.monotonic() + seconds
        while True:
            left = [pid for process in self.processes for pid in self.members(process)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


def left_in(folder):
    """Return what a run has left in its temporary directory (apart from torch's own cache: one for all runs)."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]


def session_members(session):
    """All live processes of a session (zombies are not)."""
    members = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    state, _, _, its_session = file.read().rpartition(")")[2].split()[:4]
            except (OSError, ValueError):
                continue
            if int(its_session) == session and state != "Z":
                members.append(int(entry))
    return members


def children_of(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def ranks_of(pid):
    """The ranks of a spawned job in their order, as far as they are there: forked by a child of the first process."""
    servers = forked(children_of(pid))
    return sorted(rank for server in servers for rank in forked(children_of(server)))


def forked(pids):
    """Those of Python's fork server, and its forks: loading torch starts a passing command of another name as well."""
    return [pid for pid in pids if "multiprocessing.forkserver" in command_of(pid)]


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().replace("\0", " ")
    except OSError:
        return ""


def environment_of(pid):
    try:
        with open(f"/proc/{pid}/environ", errors="replace") as file:
            return file.read().split("\0")
    except OSError:
        return []
