"""Ctrl-C, SIGTERM and SIGHUP end a job quietly, at any moment and however it was started. It leaves nothing behind."""

import os
import re
import shutil
import signal
import sys
import tempfile
import time

import pytest
import torch

from helpers import NOISE
from jobs import JOBS, RunningJob, left_in
from processes import children_of, command_of, forked, ranks_of
from programs import Program

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


def signals_of(pid, kind):
    """Return the signals that a process blocks ("SigBlk") or handles ("SigCgt")."""
    with open(f"/proc/{pid}/status") as file:
        bits = int(re.search(rf"^{kind}:\s+(\w+)", file.read(), re.M)[1], 16)
    return {number for number in signal.Signals if bits >> (number - 1) & 1}


def wait_until_it_handles_signals(pid):
    """Wait until main.py's first instruction has run. Before it, Python's default handlers end the process."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if signal.SIGTERM in signals_of(pid, "SigCgt"):
            return
        time.sleep(0.002)
    raise AssertionError("the process never handled SIGTERM")


def interrupt(way, number, target, seconds, flags=()):
    """Start a job (in terminals: only its last rank), send the signal after `seconds`, and check how it ends.

    If `seconds` is None, the signal is sent as soon as all ranks are running.
    """
    ours = {"TMPDIR": tempfile.mkdtemp()}  # the default folder is used by other programs too
    flags, only = [*JOBS["rl_rpc"]["long"], *flags], [2] if way == "terminals" else None
    with RunningJob("rl_rpc", way, flags, env=ours, only=only, cold=True) as job:
        (process,) = job.processes
        wait_until_it_handles_signals(process.pid)
        if seconds is None:
            assert job.pid_of(2), job.text()
            (fork_server,) = forked(children_of(process.pid))
            assert signals_of(fork_server, "SigBlk") >= set(STATUS)  # ranks inherit this
        else:
            time.sleep(seconds)  # the moment of this case
        (os.killpg if target == "group" else os.kill)(process.pid, number)
        status = job.wait(5)
        assert status == [STATUS[number]], (status, job.text())
        assert not job.survivors(2), job.text()
        assert job.errors() == "" and not re.search(NOISE, job.text()), job.text()
    assert left_in(ours["TMPDIR"]) == []
    shutil.rmtree(ours["TMPDIR"])


@pytest.mark.parametrize(
    "number, target, seconds",
    [(signal.SIGINT, "group", 0.0), (signal.SIGTERM, "parent", 0.9), (signal.SIGHUP, "parent", 1.9)],
)
@pytest.mark.draw(1)
def test_a_starting_process_leaves_at_once(number, target, seconds):
    interrupt("spawned", number, target, seconds)


def test_ranks_that_have_just_begun_leave_quietly(tmp_path):
    """Also with --checkpoint. A rank that had to import torch by itself would print a traceback of the import."""
    interrupt("spawned", signal.SIGINT, "group", None, ["--checkpoint", str(tmp_path / "checkpoint.pt")])


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, moment",
    [*(("spawned", n) for n in range(12)), *(("terminals", n) for n in (1, 5, 6, 10))],
)
@pytest.mark.draw(4)
def test_at_any_moment_from_the_first_instruction_on(way, moment):
    target = "group" if way == "spawned" and moment % 2 else "parent"
    interrupt(way, list(STATUS)[moment % 3], target, moment * 6 / 11)


@pytest.mark.parametrize(
    "package, way, target, number",
    [
        ("rl_rpc", "spawned", "group", signal.SIGINT),
        pytest.param("rl_rpc", "terminals", "one", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("param_server", "spawned", "parent", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("rnn_rpc", "spawned", "parent", signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param("ddp_rpc", "spawned", "group", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
@pytest.mark.draw(3)
def test_a_working_job_ends_quietly_and_keeps_the_checkpoint(package, way, target, number, tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    short_epochs = ["--max_batches", "5"] if package == "param_server" else []
    with RunningJob(package, way, [*JOBS[package]["long"], "--checkpoint", str(checkpoint), *short_epochs]) as job:
        job.wait_for_file(checkpoint, 90)
        if target == "group":
            os.killpg(job.processes[0].pid, number)
        else:
            os.kill(job.processes[-1 if target == "one" else 0].pid, number)
        assert set(job.wait(5)) == {STATUS[number]}, job.text()
        assert not job.survivors()
        assert "Traceback" not in job.text() and f"{package}: " not in job.text(), job.text()
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["scenario"] == package and saved["state"]
    assert os.listdir(tmp_path) == ["checkpoint.pt"], "a half-written file is left"


@pytest.mark.slow
def test_a_job_that_nohup_has_started_outlives_its_terminal():
    """A terminal that is closed sends SIGHUP to all processes. Other signals end the job as ever."""
    flags = [*JOBS["rl_rpc"]["long"], "--log_interval", "1"]
    with Program("rl_rpc/main.py", *flags, by=["nohup", sys.executable]) as job:
        assert job.wait_for_text(r"Episode \d+"), job.text()
        os.killpg(job.pid, signal.SIGHUP)
        played = len(re.findall(r"Episode \d+", job.output()))
        assert job.wait_for_text(rf"Episode {played + 2}\b"), job.text()
        job.send_signal(signal.SIGTERM)
        assert job.wait(5) == STATUS[signal.SIGTERM], job.text()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["torchrun", "a rank"])
@pytest.mark.draw(1)
def test_sigterm_under_torchrun_is_obeyed_within_three_seconds(target):
    """Slurm's scancel and Kubernetes send SIGTERM first."""
    with RunningJob("rl_rpc", "torchrun", JOBS["rl_rpc"]["long"]) as job:
        assert job.wait_for_text(JOBS["rl_rpc"]["training"], 90)
        ranks = [job.pid_of(rank) for rank in range(3)]
        pid = job.processes[0].pid if target == "torchrun" else ranks[1]
        os.kill(pid, signal.SIGTERM)
        told = ranks if target == "torchrun" else [pid]
        deadline = time.monotonic() + 3.5
        while any(map(command_of, told)):
            assert time.monotonic() < deadline, job.text()
            time.sleep(0.02)
        assert job.wait(10) == [1]  # torchrun's own status
        assert not job.survivors()
        assert "lost rank" not in job.text(), "nobody was lost"


def test_a_killed_starting_process_takes_every_rank_with_it():
    with RunningJob("rl_rpc", "spawned", JOBS["rl_rpc"]["long"], cold=True) as job:
        assert job.wait_for_text(JOBS["rl_rpc"]["training"], 60)
        assert job.pid_of(2)
        os.kill(job.processes[0].pid, signal.SIGKILL)
        assert job.wait(5) == [-signal.SIGKILL]
        assert not job.survivors(15), job.text()
        assert "lost the starting process" in job.errors(), job.text()


@pytest.mark.slow
def test_no_rank_is_left_when_the_starting_process_is_killed_while_a_rank_starts():
    """The rank is stopped before it has connected to the starting process, and goes on when that is gone."""
    with RunningJob("rl_rpc", "spawned", JOBS["rl_rpc"]["long"], cold=True) as job:
        deadline = time.monotonic() + 60
        while not (ranks := ranks_of(job.processes[0].pid)):
            assert time.monotonic() < deadline
        os.kill(ranks[0], signal.SIGSTOP)
        job.processes[0].kill()
        job.processes[0].wait()
        os.kill(ranks[0], signal.SIGCONT)
        assert not job.survivors(10), job.text()
        assert "master_port" not in job.text()


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_goes_on():
    """As with Ctrl-Z and fg, or on a machine that is suspended: a rank that was stopped itself loses no other rank."""
    with RunningJob("rl_rpc", "spawned", [*JOBS["rl_rpc"]["long"], "--log_interval", "1"], fault=(0, "none", 0)) as job:
        assert job.wait_for_text(r"Episode \d+", 60)
        everybody = [pid for process in job.processes for pid in job.members(process)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in everybody:
                os.kill(pid, number)
            played = len(re.findall(r"Episode \d+", job.text()))
            time.sleep(5)  # longer than faulty_main.py lets the job wait for a silent rank
        assert len(re.findall(r"Episode \d+", job.text())) > played and job.errors() == "", job.text()
