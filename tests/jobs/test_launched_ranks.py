"""Ranks that a launcher starts: torchrun on two hosts, and tasks that read their rank from environment variables."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys

import pytest

from jobs import free_port
from processes import children_of, command_of
from programs import kill, start_main, wait_for_text
from two_hosts import ADDRESSES, DEVICES, NAMES, TwoHosts, why_not

SHORT = ["--max_episodes", "8", "--eval_episodes", "1", "--join_timeout", "60"]
DONE = "Greedy policy over 1 episodes"


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.draw(1, "two nodes")
def test_torchrun_on_two_nodes():
    """With RPC and a process group."""
    with TwoHosts() as hosts, Nodes(hosts, "ddp_rpc", ["--epochs", "2", "--batches", "20"]) as nodes:
        assert nodes.wait(120) == [0, 0], nodes.texts()
        first, second = nodes.texts()
        assert "rank 0 of 4, started by torchrun" in first
        assert f"Listening on {ADDRESSES[0]} ({DEVICES[0]})." in first
        assert f"Listening on {ADDRESSES[1]} ({DEVICES[1]})." in second
        assert "accuracy" in first + second


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--rdzv-backend", "c10d"]


class Nodes:
    """torchrun on both hosts, with two ranks on each, as in docs/CLUSTERS.md for hosts named by a loopback address."""

    def __init__(self, hosts, package, flags):
        self.processes = []
        for number, address in enumerate(ADDRESSES):
            by = [*TORCHRUN, "--nproc-per-node", 2, "--rdzv-endpoint", f"{ADDRESSES[0]}:29500"]
            by += ["--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", address]
            self.processes.append(start_main(package, *flags, by=hosts.on(number, by)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in NAMES:  # each rank has its own session, so end all processes of the host
            there = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            kill(map(int, there.split()))
        for process in self.processes:
            process.kill()

    def wait(self, seconds):
        return [process.wait(seconds) for process in self.processes]

    def texts(self):
        return [process.text() for process in self.processes]


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.draw(1, "two nodes")
def test_a_loss_on_one_of_two_nodes_is_one_restart(node):
    """Two torchrun processes on this machine, with one rank each. Only one of them sees its own rank die."""
    by = [*TORCHRUN, "--nproc-per-node", 1, "--max-restarts", 1, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    by += ["--local-addr", "127.0.0.1"]
    flags = ["--mode", "rollout", "--max_episodes", "100", "--reward_threshold", "1e9", "--log_interval", "1"]
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(2):
            this = [*by, "--rdzv-conf", f"is_host={int(number == 0)}"]
            nodes.append(stack.enter_context(start_main("rl_rpc", *flags, by=this, env={"PYTHONUNBUFFERED": "1"})))
        assert wait_for_text(nodes, "Episode 3", 90)
        (victim,) = [pid for pid in children_of(nodes[node].pid) if "main.py" in command_of(pid)]
        os.kill(victim, signal.SIGKILL)
        texts = "".join(process.text() for process in nodes)
        assert [process.wait(120) for process in nodes] == [0, 0], texts
        assert "The job was restarted 1 time." in "".join(process.text() for process in nodes), texts


def quartet(rank):
    return {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}


def slurm_step(rank):
    return {"SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NODELIST": "localhost"}


def open_mpi(rank):
    return {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2}


def free_job_id():
    """Return a number for a Slurm job such that its port, 15000 + number modulo 10000, is free."""
    while True:
        number = random.randrange(10_000, 20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 5_000 + number)):
            return number


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, variables",
    [("Slurm", slurm_step), ("the environment (RANK, WORLD_SIZE, ...)", quartet), ("Open MPI", open_mpi)],
)
@pytest.mark.draw(2)
def test_two_tasks_find_each_other_by_their_environment(launcher, variables):
    port, job_id = free_port(), free_job_id()
    flags = [*SHORT, *(["--master_port", port] if launcher == "Open MPI" else [])]
    tasks = []
    for rank in range(2):
        environ = variables(rank) | ({"MASTER_PORT": port} if variables is quartet else {"SLURM_JOB_ID": job_id})
        tasks.append(start_main("rl_rpc", *flags, env=environ))
    for rank, task in enumerate(tasks):
        done = task.result(90)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert done.stdout.startswith(f"rank {rank} of 2, started by {launcher}\n") and (DONE in done.stdout) == (
            rank == 0
        )
