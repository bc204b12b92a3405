"""docs/starter.py: alone in a folder, with a worker that is killed, stopped, or mistaken, and without a leader."""

import os
import re
import shutil
import signal
import time

import psutil
import pytest

from helpers import load_module, note_lock
from programs import ROOT, Program, read_whole
from tutorials import changed


class Starter(Program):
    """A running copy of starter.py. At its end, everything that it has started must have ended, too."""

    def __init__(self, folder, *changes):
        self.path = changed(shutil.copy(ROOT / "docs" / "starter.py", folder), *changes)
        super().__init__(self.path, cwd=folder, cold=True)

    def pid_of(self, worker):
        """Wait until both workers have done something, and return the id of this worker's process."""
        for each in ("worker1", "worker2"):
            assert self.wait_for_text(f"{each} has done", 90), self.text()
        return int(re.search(rf"{worker} is process (\d+)", self.output())[1])

    def end(self, timeout=60):
        """Wait for the end of all processes. Return the exit status, stdout and stderr."""
        status = self.wait(timeout)
        deadline = time.monotonic() + 10
        while self.members():
            assert time.monotonic() < deadline, "a process outlives the program"
            time.sleep(0.05)
        return status, self.output(), self.errors()


def test_a_worker_counts_its_tasks_under_its_lock():
    worker = load_module(ROOT / "docs" / "starter.py").Worker()
    used = note_lock(worker, worker.lock, "done")
    worker.work(0.001)
    assert used == [True, True]  # read, and written


def rates_in(out):
    return re.findall(r"^worker\d has done (0\.\d+)$", out, re.MULTILINE)


@pytest.mark.slow
def test_both_workers_train_and_everybody_ends(tmp_path):
    with Starter(tmp_path) as starter:
        status, out, err = starter.end()
    assert (status, err) == (0, "")
    assert len(set(rates_in(out))) == len(rates_in(out)) == 12
    assert sum(map(int, re.findall(r"has done (\d+) tasks", out))) == 12
    assert "loss 0.9524 with learning rate 0.002" in out


def test_when_a_worker_is_killed_the_other_one_does_its_work(tmp_path):
    with Starter(tmp_path) as starter:
        os.kill(starter.pid_of("worker1"), signal.SIGKILL)
        status, out, err = starter.end()
    assert status == 0, err
    assert "worker1 is lost" in out and "worker2 is lost" not in out
    assert "RPC agent for leader encountered error when reading incoming request from worker1: " in err
    assert len(set(rates_in(out))) == len(rates_in(out)) == 12  # each one, and none of them twice
    assert "loss 0.9524 with learning rate 0.002" in out and "Traceback" not in err


@pytest.mark.slow
def test_a_mistake_in_a_method_is_shown_with_the_worker_and_the_line(tmp_path):
    with Starter(tmp_path, ("weights = torch.zeros(50)", "weights = torch.zeros(51)")) as starter:
        status, out, err = starter.end()
    assert status == 1 and "is lost" not in out
    assert re.search(r"^worker\d has failed at 0\.0\d+$", out, re.MULTILINE)
    assert re.search(r"On WorkerInfo\(id=\d, name=worker\d\):", err)
    line = 1 + read_whole(starter.path).splitlines().index(
        "            residuals = self.x[batch] @ weights - self.y[batch]"
    )
    assert f'starter.py", line {line}, in work' in err and "size mismatch" in err


@pytest.mark.slow
def test_a_silent_worker_is_given_up_and_nobody_listens_beyond_loopback(tmp_path):
    with Starter(tmp_path, ("TIMEOUT = 30 ", "TIMEOUT = 4 ")) as starter:
        os.kill(starter.pid_of("worker2"), signal.SIGSTOP)
        listens_at = [
            each.laddr.ip
            for pid in starter.members()
            for each in psutil.Process(pid).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        ]
        status, out, err = starter.end()
    assert len(listens_at) >= 3 and set(listens_at) == {"127.0.0.1"}
    assert status == 0, err
    assert "worker2 is lost" in out and len(set(rates_in(out))) == 12


@pytest.mark.slow
def test_a_worker_that_dies_when_the_work_is_done_costs_nothing(tmp_path):
    kill = '        os.kill(processes["worker1"].pid, signal.SIGKILL)\n'
    best = "        best = min(losses, key=losses.get)\n"
    with Starter(tmp_path, (best, kill + best)) as starter:
        status, out, err = starter.end()
    assert status == 0, err
    assert "loss 0.9524" in out and "worker1 is lost" in out
    done = len(re.findall(r"^worker2 has done 0\.\d+$", out, re.MULTILINE))  # 6, or more if worker1 was slow
    assert done >= 1 and f"worker2 has done {done} tasks" in out


@pytest.mark.slow
def test_without_any_worker_the_program_fails(tmp_path):
    with Starter(tmp_path) as starter:
        for worker in ("worker1", "worker2"):
            os.kill(starter.pid_of(worker), signal.SIGKILL)
        status, out, err = starter.end()
    assert status == 1 and "all workers are lost" in err and "loss" not in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_workers_end_with_the_leader(number, tmp_path):
    with Starter(tmp_path) as starter:
        starter.pid_of("worker1")
        if number == signal.SIGINT:
            os.killpg(starter.pid, number)  # as Ctrl-C does
        else:
            os.kill(starter.pid, number)
        status, out, err = starter.end()
    assert status == -number and "loss" not in out and "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_ends_the_program_also_in_a_callback(tmp_path):
    """torch only logs an exception that a callback raises, so a KeyboardInterrupt would be lost."""
    put = "future.add_done_callback(lambda future: answers.put((name, task, future)))"
    interrupted = "future.wait(), future.add_done_callback(lambda future: os.kill(os.getpid(), signal.SIGINT))"
    with Starter(tmp_path, (put, interrupted)) as starter:
        status, _, _ = starter.end()
    assert status == -signal.SIGINT


@pytest.mark.slow
def test_nobody_waits_for_ever_for_a_worker_that_does_not_come(tmp_path):
    changes = [("START_TIMEOUT = 60 ", "START_TIMEOUT = 8 "), ("    join(name, rank, folder)", "    os._exit(0)")]
    with Starter(tmp_path, *changes) as starter:
        status, _, err = starter.end()
    assert status == 1 and "Timeout (0:00:08)!" in err and "in init_rpc" in err
