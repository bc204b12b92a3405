"""Jobs for tests: start a job in any of the three ways, find the processes of its ranks, wait for its end."""

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

from helpers import ROOT, WarmCommand

# For each package: the worker names by rank; the flags for the number of ranks, for a run that does not end by itself
# ("long"), and for one that ends within seconds ("short"); what is printed during training, and when the work is done.
JOBS = {
    "rl_rpc": {
        "names": ["agent", "observer1", "observer2"],
        "size": ["--world_size", "3"],
        "long": ["--max_episodes", "1000000", "--reward_threshold", "1e9"],
        "short": ["--max_episodes", "6", "--eval_episodes", "1"],
        "training": r"Episode \d+",
        "done": r"Greedy policy over",
    },
    "rnn_rpc": {
        "names": ["server1", "trainer"],
        "size": ["--world_size", "2"],
        "long": ["--epochs", "100000", "--corpus_tokens", "20000"],
        "short": ["--epochs", "2", "--corpus_tokens", "20000"],
        "training": r"(?i)epoch\s+\d+",
        "done": r"(?i)epoch\s+2\b",
    },
    "ddp_rpc": {
        "names": ["trainer1", "trainer2", "master", "server1"],
        "size": ["--world_size", "4"],
        "long": ["--epochs", "1000000"],
        "short": ["--epochs", "2", "--batches", "20"],
        "training": r"(?i)epoch\s+\d+",
        "done": r"(?i)epoch\s+2\b",
    },
    "param_server": {
        "names": ["server1", "trainer1", "trainer2"],
        "size": ["--world_size", "3"],
        "long": ["--dataset", "synthetic", "--epochs", "100000", "--log_interval", "10"],
        "short": ["--dataset", "synthetic", "--max_batches", "10"],
        "training": r"training batch",
        "done": r"Accuracy",
    },
}
WAYS = ("spawned", "terminals", "torchrun")


def free_port():
    """Return a free port, below the range from which the system assigns ports to connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def fill_with_traps(folder):
    """Write into `folder` a file for each module name that a job may import. A file that is imported leaves a mark.

    They stand for a user's files that happen to have such names. A job that is started in this folder must import none
    of them.
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
    """One job. Used as a context manager: all processes of the job are killed at the end of the block."""

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
        warm=False,
    ):
        """Start the job. `way`: one of WAYS; `flags`: of main.py.

        `fault`: (rank, kind, seconds), see faulty_main.py; `other_hostname`: if root, give the host a name that does
        not resolve; `runner_flags`: of torchrun; `env`: further environment variables; `only`: the ranks to start;
        `script`: what to run instead of the package's main.py; `cwd`: the working directory; `warm`: the
        commands and their ranks are forks of a process that has imported torch already (see warm.py), for jobs whose
        start is not tested.
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
        if other_hostname and os.geteuid() == 0:  # a host name that does not resolve to loopback
            rename = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere.invalid; exec "$@"', "sh"]
            commands = [[*rename, *command] for command in commands]
        self.folder = tempfile.TemporaryDirectory()
        self.outputs, self.processes = [], []  # outputs: stdout and stderr of each process in turn
        for number, command in enumerate(commands):
            streams = [open(os.path.join(self.folder.name, f"{number}.{name}"), "w+") for name in ("out", "err")]
            variables = {"PYTHONUNBUFFERED": "1"} | (env or {})
            self.outputs += streams
            out, err = streams
            if warm and way != "torchrun":
                process = WarmCommand(command, out.name, err.name, cwd, variables)
            else:
                process = subprocess.Popen(
                    command, stdout=out, stderr=err, start_new_session=True, env=os.environ | variables, cwd=cwd
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
        """Return all output so far of all processes, or that of `outputs`."""
        parts = []
        for output in self.outputs if outputs is None else outputs:
            with open(output.name, errors="replace") as file:
                parts.append(file.read())
        return "\n".join(parts).strip()

    def errors(self):
        """Return what all processes have written to stderr so far."""
        return self.text(self.outputs[1::2])

    def wait_for_text(self, pattern, seconds):
        """Return True when the job has printed `pattern`; False if all its processes ended without printing it."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text()):
            if all(process.poll() is not None for process in self.processes):
                return bool(re.search(pattern, self.text()))
            assert time.monotonic() < deadline, f"{pattern!r} not printed within {seconds} s:\n{self.text()}"
            time.sleep(0.05)
        return True

    def wait_for_file(self, path, seconds):
        """Return when the file exists."""
        deadline = time.monotonic() + seconds
        while not os.path.exists(path):
            assert time.monotonic() < deadline, f"no {path} after {seconds} s:\n{self.text()}"
            time.sleep(0.02)

    def pid_of(self, rank, seconds=60):
        """Return the process id of a rank when all ranks are running; None if the job ends before.

        If the fork server has only some children yet, one of them may be a command that importing torch starts.
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
        """Wait until every process that was started has ended; return their exit statuses. Fails after `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            while process.poll() is None and not self.is_stopped(process.pid):  # by the test: then it will not end
                assert time.monotonic() < deadline, f"still running after {seconds} s:\n{self.text()}"
                time.sleep(0.01)
        return [process.returncode for process in self.processes]

    @staticmethod
    def is_stopped(pid):
        return status_of(pid)[0] == "T"

    def members(self, process):
        """Return the live processes that `process` has started, directly or indirectly, and itself."""
        members = session_members(process.pid)
        if self.way == "torchrun":  # each rank has a session of its own; the port identifies them
            everyone = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
            members += [pid for pid in everyone if f"MASTER_PORT={self.port}" in environment_of(pid)]
        return members

    def survivors(self, seconds=5):
        """Return the processes of this job that do not end within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            left = [pid for process in self.processes for pid in self.members(process)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


def left_in(folder):
    """Return the files that a run has left in its temporary directory, without torch's cache, which runs share."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]


def session_members(leader):
    """Return the processes of the session, or of the process group, that this process has started, without zombies."""
    return [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit()
        for state, _, group, session, *_ in [status_of(entry)]
        if leader in (int(group), int(session)) and state != "Z"
    ]


def status_of(pid):
    """Return what Linux tells of a process, from its state on; zeros if there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return ["0"] * 4


def children_of(pid):
    """Return the children of a process, in the order in which they were started (process ids wrap around)."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def ranks_of(pid):
    """Return the process ids of a spawned job's ranks that run already, in their order.

    The ranks are children of the fork server, which is a child of the process `pid`, or of warm.py. There they share
    the process group of `pid`.
    """
    own = forked(children_of(pid))
    if own:
        return [rank for server in own for rank in forked(children_of(server))]
    shared = forked(children_of(status_of(pid)[1]))
    return [rank for server in shared for rank in children_of(server) if int(status_of(rank)[2]) == pid]


def forked(pids):
    """Return those of `pids` that are Python's fork server or forks of it.

    Importing torch starts short-lived commands of other names, which are left out.
    """
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
