"""Ctrl-C, SIGTERM and SIGHUP end a job quietly, however it was started. It leaves nothing behind."""

import os
import re
import signal
import sys
import tempfile
import time

import pytest
import torch

from jobs import JOBS, RunningJob, free_port, left_in
from patches import main_with
from processes import ranks_of, wait_until
from programs import Program


def end_by_ctrl_c(job):
    """Send SIGINT to a spawned job's group of processes, and check that it ends quietly."""
    (process,) = job.processes
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(6) == -signal.SIGINT, job.text()
    assert not job.left_over(2), job.text()
    assert job.errors() == "" and "Traceback" not in job.text(), job.text()


def test_ranks_that_have_just_begun_leave_quietly():
    # Not tmp_path, whose name may be too long for the address of a socket.
    with tempfile.TemporaryDirectory() as temporary:
        with RunningJob("rl_rpc", "spawned", JOBS["rl_rpc"]["long"], env={"TMPDIR": temporary}) as job:
            assert job.pid_of(2), job.text()
            end_by_ctrl_c(job)
        assert left_in(temporary) == []


@pytest.mark.quick
def test_a_working_job_ends_quietly_and_keeps_the_checkpoint(tmp_path):
    """test_starting.py sends SIGTERM and SIGHUP to ranks in terminals."""
    checkpoint = tmp_path / "checkpoint.pt"
    with RunningJob("rl_rpc", "spawned", [*JOBS["rl_rpc"]["long"], "--checkpoint", checkpoint]) as job:
        wait_until(checkpoint.exists, 90, job.text)
        end_by_ctrl_c(job)
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["scenario"] == "rl_rpc" and saved["state"]


def keeps_the_gil(ctypes, step):
    reset = step.Observer.reset

    def reset_after_a_long_time(self, episode):
        if episode == 2:
            ctypes.PyDLL(None).sleep(12)
        return reset(self, episode)

    step.Observer.reset = reset_after_a_long_time


def test_a_job_outlives_a_rank_that_keeps_the_gil_its_terminal_and_ctrl_z(tmp_path):
    """The C code of an observer runs for longer than a machine that is gone is waited for. No Python runs meanwhile.

    A terminal that is closed sends SIGHUP to all processes, which nohup lets them ignore. Other signals end the job.
    Ctrl-Z stops all processes, here for as long as the C code runs.
    """
    main = main_with("rl_rpc", tmp_path, keeps_the_gil)
    flags = [*JOBS["rl_rpc"]["long"], "--mode", "rollout", "--log_interval", "1"]
    with Program(main, *flags, by=["nohup", sys.executable]) as job:
        assert job.wait_for_text(r"Episode 3\b"), job.text()
        for number in (signal.SIGHUP, signal.SIGSTOP):
            os.killpg(job.pid, number)
        time.sleep(12)
        os.killpg(job.pid, signal.SIGCONT)
        played = len(re.findall(r"Episode \d+", job.output()))
        assert job.wait_for_text(rf"Episode {played + 100}\b"), job.text()
        assert job.errors().removeprefix("nohup: ignoring input\n") == "", job.text()
        job.send_signal(signal.SIGTERM)
        assert job.wait(6) == -signal.SIGTERM, job.text()
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


@pytest.mark.parametrize("program", ["main", "tutorial"])
def test_no_rank_is_left_when_the_starting_process_is_killed_while_a_rank_starts(program):
    """tutorial.py spawns its ranks: each imports torch, and asks for a signal at the death of its parent afterwards."""
    port = ("--master_port", free_port()) if program == "tutorial" else ()
    at_first = 3 if program == "tutorial" else 2  # multiprocessing has started a process of its own before
    with Program(f"rl_rpc/{program}.py", "--world_size", 3, *port) as job:
        wait_until(lambda: len(job.members()) >= at_first, 60, job.text)
        job.send_signal(signal.SIGKILL)
        job.wait()
        assert not job.left_over(45), job.text()
