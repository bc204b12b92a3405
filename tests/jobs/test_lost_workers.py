"""--on_lost continue, tested without a scenario: workers call rank 0 (tests/harness/counting_main.py)."""

import os
import signal

import pytest

from helpers import ROOT, assert_refused
from jobs import RunningJob

COUNTING = str(ROOT / "tests" / "harness" / "counting_main.py")
GO_ON = ["--on_lost", "continue"]


def start(way, *flags):
    return RunningJob("rl_rpc", way, [*GO_ON, *flags], script=COUNTING)


def wait_until_all_count(job):
    for rank in (1, 2):
        assert job.wait_for_text(f"worker {rank} counts", 60)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=SLOW)])
def test_the_others_go_on_without_a_lost_worker(number):
    """For spawned ranks. tests/jobs/rl_rpc/test_lost_observers.py tests ranks in terminals."""
    with start("spawned", "--enough", "2000") as job:
        wait_until_all_count(job)
        os.kill(job.pid_of(2), number)
        assert job.wait(20) == [0], job.text()  # a stopped worker is lost after 8 s
        text = job.text()
        assert "done, lost [2]" in text and "The job finished without rank 2 (worker2)." in text
        (line,) = [line for line in job.errors().splitlines() if line]
        assert line.startswith("rl_rpc: lost rank 2 (worker2): ") and line.endswith(" calls count"), line
        assert not job.survivors()


def test_a_worker_that_fails_is_dropped_with_its_own_words():
    with start("spawned", "--enough", "50", "--fail", "1") as job:
        assert job.wait(60) == [0]
        lines = job.errors().splitlines()
        assert "rl_rpc: lost rank 1 (worker1): ValueError: injected fault; its 20 calls count" in lines
        assert "rl_rpc: rank 1 (worker1): ValueError: injected fault" in lines
        assert job.errors().count("Traceback") == 1 and "worker 2" not in job.errors()


@SLOW
def test_a_stopped_worker_that_wakes_up_leaves_by_itself():
    with start("terminals", "--enough", "1000000") as job:
        wait_until_all_count(job)
        os.kill(job.processes[2].pid, signal.SIGSTOP)
        assert job.wait_for_text(r"lost rank 2 \(worker2\): silent for 8 s ", 30)
        os.kill(job.processes[2].pid, signal.SIGCONT)
        assert job.processes[2].wait(10) == 1
        assert "rank 2 (worker2): the others have gone on without it: silent for" in job.processes[2].text()
        assert job.processes[0].poll() is None and job.processes[1].poll() is None


@SLOW
def test_the_loss_of_the_last_worker_ends_the_job():
    with start("spawned") as job:
        wait_until_all_count(job)
        pids = [job.pid_of(rank) for rank in range(3)]
        os.kill(pids[2], signal.SIGKILL)
        assert job.wait_for_text(r"lost rank 2 \(worker2\)", 20)
        os.kill(pids[1], signal.SIGKILL)
        assert job.wait(20) == [1]
        assert "lost rank 1 (worker1)" in job.errors() and "finished" not in job.text()


def test_under_torchrun_it_is_refused_in_one_line(capsys, monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert_refused("rl_rpc", GO_ON, capsys, "--on_lost continue: torchrun ends all ranks when one is lost")
