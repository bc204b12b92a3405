"""Jobs for tests: start a job in any of the three ways, find the processes of its ranks, wait for its end."""

import contextlib
import importlib.metadata
import os
import random
import socket
import sys
import sysconfig
import time

from processes import environment_of, ranks_of
from programs import ROOT, Program, left_over, wait_for_text

# For each package: the worker names by rank; the flags for the number of ranks, for a run that does not end by itself
# ("long"), for one that ends within seconds ("short"), and for one of a
# single step; which rank writes the files; what is printed during training, and when the work is done.
JOBS = {
    "rl_rpc": {
        "names": ["agent", "observer1", "observer2"],
        "size": ["--world_size", "3"],
        "long": ["--max_episodes", "1000000", "--reward_threshold", "1e9"],
        "short": ["--max_episodes", "6", "--eval_episodes", "1"],
        "shortest": ["--max_episodes", "1", "--eval_episodes", "0"],
        "writer": "agent",
        "training": r"Episode \d+",
        "done": r"Greedy policy over",
    },
    "rnn_rpc": {
        "names": ["server1", "trainer"],
        "size": ["--world_size", "2"],
        "long": ["--epochs", "100000", "--corpus_tokens", "20000"],
        "short": ["--epochs", "2", "--corpus_tokens", "20000"],
        "shortest": ["--epochs", "1", "--corpus_tokens", "1000"],
        "writer": "trainer",
        "training": r"(?i)epoch\s+\d+",
        "done": r"(?i)epoch\s+2\b",
    },
    "ddp_rpc": {
        "names": ["trainer1", "trainer2", "master", "server1"],
        "size": ["--world_size", "4"],
        "long": ["--epochs", "1000000"],
        "short": ["--epochs", "2", "--batches", "20"],
        "shortest": ["--epochs", "1", "--batches", "1"],
        "writer": "master",
        "training": r"(?i)epoch\s+\d+",
        "done": r"(?i)epoch\s+2\b",
    },
    "param_server": {
        "names": ["server1", "trainer1", "trainer2"],
        "size": ["--world_size", "3"],
        "long": ["--dataset", "synthetic", "--epochs", "100000", "--log_interval", "10"],
        "short": ["--dataset", "synthetic", "--max_batches", "10"],
        "shortest": ["--dataset", "synthetic", "--max_batches", "1"],
        "writer": "server1",
        "training": r"training batch",
        "done": r"Accuracy",
    },
}
# The ways with a command for each rank. In the second one, environment variables tell a rank its place.
ONE_BY_ONE = ("terminals", "environment")


def free_port():
    """Return a free port, below the range from which the system assigns ports to connections and to RPC's listeners.

    What connects to a port that nobody listens at any more must not reach another test's RPC (std::bad_alloc there).
    """
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


class RunningJob:
    """All ranks of a main.py. Used as a context manager: nothing of the job is left after the block."""

    def __init__(self, package, way, flags, script=None, runner_flags=(), hosts=None, **how):
        """Start the job. `way`: "spawned", "torchrun", or one of ONE_BY_ONE; `flags`: of main.py; `how`: see Program.

        `script`: what to run instead of the package's main.py; `runner_flags`: of torchrun; `hosts`: the TwoHosts on
        which the ranks are in turn, beginning with rank 0 on host 0.
        """
        self.package, self.way, self.one_by_one = package, way, way in ONE_BY_ONE
        self.names = JOBS[package]["names"]
        words = [script or f"{package}/main.py", *JOBS[package]["size"], *flags]
        self.port = free_port()
        how["env"] = {"PYTHONUNBUFFERED": "1"} | (how.get("env") or {})
        if way == "torchrun":
            here = ["--master-port", self.port, "--nproc-per-node", len(self.names)]
            how["by"] = [os.path.join(sysconfig.get_path("scripts"), "torchrun"), *here, *runner_flags]
        self.processes = []
        if self.one_by_one:
            for rank in range(len(self.names)):
                if hosts:
                    how["by"] = hosts.on(rank % 2, [sys.executable])
                place = ["--master_port", self.port, "--rank", rank]
                if way == "environment":
                    place, size = [], len(self.names)
                    quartet = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
                    how["env"] = how["env"] | quartet
                self.processes.append(Program(*words, *place, **how))
        else:
            self.processes.append(Program(*words, **how))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()

    def text(self):
        """Return all output so far of all processes."""
        return "\n".join(process.text() for process in self.processes).strip()

    def errors(self):
        """Return what all processes have written to stderr so far."""
        return "\n".join(process.errors() for process in self.processes).strip()

    def wait_for_text(self, pattern, seconds):
        """Return True when the job has printed `pattern`; False if all its processes ended without printing it."""
        return wait_for_text(self.processes, pattern, seconds)

    def wait_for_file(self, path, seconds):
        """Return when the file exists."""
        deadline = time.monotonic() + seconds
        while not os.path.exists(path):
            assert time.monotonic() < deadline, f"no {path} after {seconds} s:\n{self.text()}"
            time.sleep(0.02)

    def pid_of(self, rank, seconds=60):
        """Return the process id of a rank when all ranks are running; None if the job ends before."""
        if self.one_by_one:
            return self.processes[rank].pid
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.processes[0].poll() is None:
            if self.way == "torchrun":
                members = self.processes[0].members()
                found = [pid for pid in members if f"RANK={rank}" in environment_of(pid)][:1]
            else:
                found = ranks_of(self.processes[0].pid, len(self.names))[rank : rank + 1]
            if found:
                return found[0]
            time.sleep(0.02)
        return None

    def wait(self, seconds):
        """Wait until every process that was started has ended; return their exit statuses. Fails after `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            while process.poll() is None:
                assert time.monotonic() < deadline, f"still running after {seconds} s:\n{self.text()}"
                time.sleep(0.01)
        return [process.returncode for process in self.processes]

    def survivors(self, seconds=5):
        """Return the processes of this job that do not end within `seconds`."""
        return left_over(self.processes, seconds)


def left_in(folder):
    """Return the files that a run has left in its temporary directory, without torch's cache, which runs share."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]
