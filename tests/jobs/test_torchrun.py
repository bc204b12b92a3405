"""Ranks that torchrun starts, on one host or on two, and starts again when one is lost."""

import contextlib
import json
import os
import re
import signal
import sys

from jobs import JOBS, RunningJob, folder_of_traps, free_port
from processes import children_of, command_of, wait_until
from programs import Program, Programs
from two_hosts import ADDRESSES, TwoHosts, why_not


def test_torchrun_starts_a_job_again_from_its_checkpoint_and_ends_it_by_sigterm(tmp_path):
    """In a folder with files named like ours. Slurm's scancel and Kubernetes send SIGTERM first."""
    checkpoint, restart = tmp_path / "checkpoint.pt", ["--max-restarts", 1]
    flags = [*JOBS["rnn_rpc"]["long"], "--checkpoint", checkpoint, "--resume"]
    with (
        folder_of_traps(tmp_path / "users") as users_folder,
        RunningJob("rnn_rpc", "torchrun", flags, runner_flags=restart, cwd=users_folder) as job,
    ):
        wait_until(checkpoint.exists, 90, job.text)
        os.kill(job.pid_of(1), signal.SIGKILL)
        assert job.wait_for_text(r"Going on after epoch \d+", 90), job.text()
        assert re.search(r"lost rank 1 \(trainer\)|\brank +: 1 ", job.errors()), job.text()
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.wait(10) == [1] and not job.left_over(), job.text()  # torchrun's own status


def test_a_loss_on_one_of_two_nodes_is_one_restart(tmp_path):
    """Two torchrun processes with two ranks each, as in docs/CLUSTERS.md, on two hosts if this machine can make them.

    Only one of them sees its own rank die. With RPC and a process group.
    """
    summary = tmp_path / "summary.json"  # the master writes it, which is not rank 0
    here = ADDRESSES[0] if not why_not() else "127.0.0.1"
    by = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", 1]
    by += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{here}:{free_port()}"]
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(TwoHosts()) if not why_not() else None
        nodes = stack.enter_context(Programs([]))
        for number in range(2):
            this = [*by, "--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr"]
            this = hosts.on(number, [*this, ADDRESSES[number]]) if hosts else [*this, here]
            flags, env = ["--epochs", 10, "--batches", 50, "--summary_json", summary], {"PYTHONUNBUFFERED": "1"}
            nodes.processes.append(Program("ddp_rpc/main.py", *flags, by=this, env=env))
        assert nodes.wait_for_text("epoch +1/", 120)
        victim = next(pid for pid in children_of(nodes.processes[1].pid) if "main.py" in command_of(pid))
        os.kill(victim, signal.SIGKILL)
        assert nodes.wait() == [0, 0], nodes.text()
        assert json.loads(summary.read_text())["restarts"] == 1
