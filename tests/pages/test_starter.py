"""docs/starter.py: alone in a folder, with a worker that is killed, stopped, or mistaken, and without a leader."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers import ROOT, read_whole
from jobs import session_members
from tutorials import changed


class Starter:
    """A running copy of starter.py. When the block ends, everything that it has started must have ended, too."""

    def __init__(self, folder, *changes):
        self.path = changed(shutil.copy(ROOT / "docs" / "starter.py", folder), *changes)
        self.out, self.err = folder / "out", folder / "err"
        with open(self.out, "w") as out, open(self.err, "w") as err:
            command = [sys.executable, self.path]
            self.process = subprocess.Popen(command, stdout=out, stderr=err, cwd=folder, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in session_members(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def pid_of(self, worker):
        """Wait until both workers have done something, and return the id of this worker's process."""
        deadline = time.monotonic() + 90
        while not all(f"{each} has done" in read_whole(self.out) for each in ("worker1", "worker2")):
            assert self.process.poll() is None and time.monotonic() < deadline, read_whole(self.err)
            time.sleep(0.02)
        return int(re.search(rf"{worker} is process (\d+)", read_whole(self.out))[1])

    def end(self, timeout=60):
        """Wait for the end of all processes. Return the exit status, stdout and stderr."""
        status = self.process.wait(timeout)
        deadline = time.monotonic() + 10
        while session_members(self.process.pid):
            assert time.monotonic() < deadline, "a process outlives the program"
            time.sleep(0.05)
        return status, read_whole(self.out), read_whole(self.err)


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
    assert len(set(rates_in(out))) == len(rates_in(out)) == 12  # each one, and none of them twice
    assert "loss 0.9524 with learning rate 0.002" in out and "Traceback" not in err


def test_a_mistake_in_a_method_is_shown_with_the_worker_and_the_line(tmp_path):
    with Starter(tmp_path, ("weights = torch.zeros(50)", "weights = torch.zeros(51)")) as starter:
        status, out, err = starter.end()
    assert status == 1 and "is lost" not in out
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
            for pid in session_members(starter.process.pid)
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
    assert "loss 0.9524" in out and "worker1 is lost" in out and "worker2 has done 6 tasks" in out


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
            os.killpg(starter.process.pid, number)  # as Ctrl-C does
        else:
            os.kill(starter.process.pid, number)
        status, out, err = starter.end()
    assert status == -number and "loss" not in out
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)


@pytest.mark.slow
def test_nobody_waits_for_ever_for_a_worker_that_does_not_come(tmp_path):
    changes = [("START_TIMEOUT = 60 ", "START_TIMEOUT = 8 "), ("    join(name, rank, folder)", "    os._exit(0)")]
    with Starter(tmp_path, *changes) as starter:
        status, _, err = starter.end()
    assert status == 1 and "Timeout (0:00:08)!" in err and "in init_rpc" in err
