"""Jobs for tests: start a job in any of the three ways, and find the processes of its ranks."""

import contextlib
import importlib.metadata
import os
import random
import socket
import sys
import sysconfig

from processes import environment_of, ranks_of, wait_until
from programs import ROOT, Program, Programs

# For each package: the worker names by rank; the flags for a run that does not end by itself ("long"), for one that
# ends within seconds ("short"), and for one of a single step; what is printed during training, and when the work is
# done.
JOBS = {
    "rl_rpc": {
        "names": ["agent", "observer1", "observer2"],
        "long": ["--max_episodes", "1000000", "--reward_threshold", "1e9"],
        "short": ["--max_episodes", "6", "--eval_episodes", "1"],
        "shortest": ["--max_episodes", "1", "--eval_episodes", "0"],
        "training": r"Episode \d+",
        "done": r"Greedy policy over",
    },
    "rnn_rpc": {
        "names": ["server1", "trainer"],
        "long": ["--epochs", "100000", "--corpus_tokens", "20000"],
        "short": ["--epochs", "2", "--corpus_tokens", "20000"],
        "shortest": ["--epochs", "1", "--corpus_tokens", "1000"],
        "training": r"(?i)epoch\s+\d+",
        "done": r"(?i)epoch\s+2\b",
    },
    "ddp_rpc": {
        "names": ["trainer1", "trainer2", "master", "server1"],
        "long": ["--epochs", "1000000"],
        "short": ["--epochs", "2", "--batches", "20"],
        "shortest": ["--epochs", "1", "--batches", "1"],
        "training": r"(?i)epoch\s+\d+",
        "done": r"(?i)epoch\s+2\b",
    },
    "param_server": {
        "names": ["server1", "trainer1", "trainer2"],
        "long": ["--dataset", "synthetic", "--epochs", "100000", "--log_interval", "10"],
        "short": ["--dataset", "synthetic", "--max_batches", "10"],
        "shortest": ["--dataset", "synthetic", "--max_batches", "1"],
        "training": r"training batch",
        "done": r"Accuracy",
    },
}


def free_port():
    """Return a free port, below the range from which the system assigns ports to connections and to RPC's listeners.

    What connects to a port that nobody listens at any more must not reach another test's RPC (std::bad_alloc there).
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def folder_of_traps(folder):
    """Make a folder with a file for each module name that a job may import, and check that none of them was imported.

    They stand for a user's files that happen to have such names.
    """
    folder.mkdir()
    ours = {path.stem for package in JOBS for path in (ROOT / package).iterdir()}
    installed = set(importlib.metadata.packages_distributions())
    assert {"main", "glue"} <= ours and "torch" in installed
    for name in filter(str.isidentifier, ours | installed | sys.stdlib_module_names):
        (folder / f"{name}.py").write_text("open(__file__ + '.imported', 'w').close()\n")
    yield folder
    assert [*folder.glob("*.imported")] == []


class RunningJob(Programs):
    """All ranks of a main.py."""

    def __init__(self, package, way, flags, script=None, runner_flags=(), hosts=None, **how):
        """Start the job. `way`: "spawned", "torchrun", or "terminals"; `flags`: of main.py; `how`: see Program.

        `script`: what to run instead of the package's main.py; `runner_flags`: of torchrun; `hosts`: the TwoHosts on
        which the ranks are in turn, beginning with rank 0 on host 0.
        """
        self.package, self.way, self.names = package, way, JOBS[package]["names"]
        words = [script or f"{package}/main.py", "--world_size", len(self.names), *flags]
        port = free_port()
        how["env"] = {"PYTHONUNBUFFERED": "1"} | (how.get("env") or {})
        if way == "torchrun":
            here = ["--master-port", port, "--nproc-per-node", len(self.names)]
            how["by"] = [os.path.join(sysconfig.get_path("scripts"), "torchrun"), *here, *runner_flags]
        places = [[]]
        if way == "terminals":
            places = [["--master_port", port, "--rank", rank] for rank in range(len(self.names))]
        super().__init__([])
        for rank, place in enumerate(places):
            if hosts:
                how["by"] = hosts.on(rank % 2, [sys.executable])
            self.processes.append(Program(*words, *place, **how))

    def pid_of(self, rank):
        """Return the process id of a rank when all ranks are running; None if the job ends before."""
        if self.way == "terminals":
            return self.processes[rank].pid
        (process,) = self.processes

        def found():
            if self.way == "torchrun":
                return [pid for pid in process.members() if f"RANK={rank}" in environment_of(pid)]
            return ranks_of(process.pid, len(self.names))[rank:]

        wait_until(lambda: self.have_ended() or found(), 60, self.text)
        return next(iter(found()), None)


def left_in(folder):
    """Return the files that a run has left in its temporary directory, without torch's cache, which runs share."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor_")]
