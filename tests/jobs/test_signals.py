"""Ctrl-C, SIGTERM and SIGHUP end a job quietly, however it was started. It leaves nothing behind."""

import os
import re
import signal
import sys
import tempfile
import time

import pytest
import torch

from jobs import JOBS, RunningJob, left_in
from processes import ranks_of
from programs import Program


def status_in_a_shell(status):
    """Return what a shell shows for this status of a process. It shows 130 for one that SIGINT has killed."""
    return 128 - status if status < 0 else status


def end_by(job, number, target):
    """Send a signal to a spawned job, and check that it ends quietly. `target`: the "group" of processes, or "one"."""
    (process,) = job.processes
    (os.killpg if target == "group" else os.kill)(process.pid, number)
    assert status_in_a_shell(process.wait(6)) == 128 + number, job.text()
    assert not job.survivors(2), job.text()
    assert job.errors() == "" and "Traceback" not in job.text(), job.text()


def test_ranks_that_have_just_begun_leave_quietly():
    # Not tmp_path, whose name may be too long for the address of a socket.
    with tempfile.TemporaryDirectory() as temporary:
        with RunningJob("rl_rpc", "spawned", JOBS["rl_rpc"]["long"], env={"TMPDIR": temporary}) as job:
            assert job.pid_of(2), job.text()
            end_by(job, signal.SIGINT, "group")
        assert left_in(temporary) == []


@pytest.mark.parametrize(
    "package, number, target",
    [
        pytest.param("rl_rpc", signal.SIGINT, "group", marks=pytest.mark.quick),
        ("param_server", signal.SIGHUP, "one"),
    ],
)
def test_a_working_job_ends_quietly_and_keeps_the_checkpoint(package, number, target, tmp_path):
    """test_starting.py sends SIGTERM to ranks in terminals."""
    checkpoint = tmp_path / "checkpoint.pt"
    short_epochs = ["--max_batches", "5"] if package == "param_server" else []
    with RunningJob(package, "spawned", [*JOBS[package]["long"], "--checkpoint", checkpoint, *short_epochs]) as job:
        job.wait_for_file(checkpoint, 90)
        end_by(job, number, target)
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["scenario"] == package and saved["state"]


def episodes_in(job):
    return len(re.findall(r"Episode \d+", job.output()))


def test_a_job_outlives_its_terminal_and_ctrl_z():
    """A terminal that is closed sends SIGHUP to all processes, which nohup lets them ignore. Other signals end the job.

    Ctrl-Z stops all processes, here for longer than a machine that is gone is waited for.
    """
    flags = [*JOBS["rl_rpc"]["long"], "--mode", "rollout", "--log_interval", "1"]
    with Program("rl_rpc/main.py", *flags, by=["nohup", sys.executable]) as job:
        assert job.wait_for_text(r"Episode \d+"), job.text()
        for number in (signal.SIGHUP, signal.SIGSTOP):
            os.killpg(job.pid, number)
        time.sleep(12)
        os.killpg(job.pid, signal.SIGCONT)
        assert job.wait_for_text(rf"Episode {episodes_in(job) + 100}\b"), job.text()
        job.send_signal(signal.SIGTERM)
        assert status_in_a_shell(job.wait(6)) == 143, job.text()
        assert not job.left_over(2) and "lost" not in job.errors(), job.text()


@pytest.mark.quick
def test_a_killed_starting_process_takes_every_rank_with_it():
    """The ranks ignore SIGINT, as in the background of a shell script, and nobody reads what they print."""
    read, write = os.pipe()
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable]
    with Program("rl_rpc/main.py", *JOBS["rl_rpc"]["long"], by=ignoring, stdout=write, stderr=write) as job:
        os.close(write)
        with open(read) as output:  # as soon as it is closed, the job may end for this reason
            assert any("Episode" in line for line in output)
            assert ranks_of(job.pid, 2)
            job.send_signal(signal.SIGKILL)
            job.wait()
        assert not job.left_over(15), job.members()


def test_no_rank_is_left_when_the_starting_process_is_killed_while_a_rank_starts():
    with RunningJob("rl_rpc", "spawned", JOBS["rl_rpc"]["long"]) as job:
        (process,) = job.processes
        deadline = time.monotonic() + 60
        while not ranks_of(process.pid, 1):
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not job.survivors(15), job.text()
