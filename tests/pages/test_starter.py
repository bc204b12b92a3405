"""docs/starter.py: alone in a folder, with a worker that is killed, stopped, or mistaken, and without a leader."""

import os
import re
import shlex
import shutil
import signal

import psutil
import pytest

from forks import run_in_forks
from programs import ROOT, Program
from tutorials import changed


def copied(folder, *changes):
    """Return the path of a copy. If it is changed anyway, its workers are forks, which need not import torch."""
    forked = ('get_context("spawn")', 'get_context("fork")')
    return changed(shutil.copy(ROOT / "docs" / "starter.py", folder), *changes, *([forked] if changes else []))


class Starter(Program):
    """A running copy of starter.py."""

    def __init__(self, folder, *changes):
        super().__init__(copied(folder, *changes), cwd=folder)

    def pid_of(self, worker):
        """Wait until both workers have done something, and return the id of this worker's process."""
        for each in ("worker1", "worker2"):
            assert self.wait_for_text(f"{each} has done", 90), self.text()
        return int(re.search(rf"{worker} is process (\d+)", self.output())[1])

    def end(self):
        """Wait for its end, after which no process may be left. Return the exit status, stdout and stderr."""
        status = self.wait(60)
        assert not self.left_over(30), "a process outlives the program"
        return status, self.output(), self.errors()


def rates_in(out):
    return re.findall(r"^worker\d has done (0\.\d+)$", out, re.MULTILINE)


def test_both_workers_train_and_everybody_ends(tmp_path):
    with Starter(tmp_path) as starter:
        status, out, err = starter.end()
    assert (status, err) == (0, "")
    assert len(set(rates_in(out))) == len(rates_in(out)) == 12
    assert sum(map(int, re.findall(r"has done (\d+) tasks", out))) == 12
    assert "loss 0.9524 with learning rate 0.002" in out


CHANGES = {  # of copies whose end is all that is to be seen
    "a mistake": [("weights = torch.zeros(50)", "weights = torch.zeros(51)")],
    "Ctrl-C in a callback": [
        (
            "future.add_done_callback(lambda future: answers.put((name, task, future)))",
            "future.wait(), future.add_done_callback(lambda future: os.killpg(0, signal.SIGINT))",
        )
    ],
    "a worker that does not come": [
        ("START_TIMEOUT = 60 ", "START_TIMEOUT = 8 "),
        ("    join(name, rank, folder)", "    os._exit(0)"),
    ],
}
GROUP = pytest.mark.xdist_group("starter")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run the copies of CHANGES; return {name: CompletedProcess}."""
    folder = tmp_path_factory.mktemp("starter")
    for name, changes in CHANGES.items():
        (folder / name).mkdir()
        copied(folder / name, *changes)
    done = run_in_forks(folder, [shlex.quote(f"{name}/starter.py") for name in CHANGES])
    return dict(zip(CHANGES, done.values(), strict=True))


def test_a_killed_workers_tasks_are_done_by_the_other_one_which_may_die_when_it_has_done_them(tmp_path):
    kill = '        os.kill(processes["worker2"].pid, signal.SIGKILL)\n'
    best = "        best = min(losses, key=losses.get)\n"
    with Starter(tmp_path, (best, kill + best)) as starter:
        os.kill(starter.pid_of("worker1"), signal.SIGKILL)
        status, out, err = starter.end()
    assert status == 0, err
    training, _, afterwards = out.partition("loss 0.9524 with learning rate 0.002")
    assert "worker1 is lost" in training and "worker2 is lost" not in training
    assert "RPC agent for leader encountered error when reading incoming request from worker1: " in err
    assert len(set(rates_in(out))) == len(rates_in(out)) == 12  # each one, and none of them twice
    assert "worker2 is lost" in afterwards and "worker1" not in afterwards and "Traceback" not in err


@GROUP
def test_a_mistake_in_a_method_is_shown_with_the_worker_and_the_line(ended):
    done = ended["a mistake"]
    assert done.returncode == 1 and "is lost" not in done.stdout
    assert re.search(r"^worker\d has failed at 0\.0\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"On WorkerInfo\(id=\d, name=worker\d\):", done.stderr)
    lines = (ROOT / "docs" / "starter.py").read_text().splitlines()
    line = 1 + lines.index("            residuals = self.x[batch] @ weights - self.y[batch]")
    assert f'starter.py", line {line}, in work' in done.stderr and "size mismatch" in done.stderr


def test_a_silent_worker_is_given_up_and_without_any_worker_the_program_fails(tmp_path):
    with Starter(tmp_path, ("TIMEOUT = 30 ", "TIMEOUT = 8 ")) as starter:
        worker1, worker2 = (starter.pid_of(worker) for worker in ("worker1", "worker2"))
        os.kill(worker2, signal.SIGSTOP)
        os.kill(worker1, signal.SIGKILL)
        listens_at = [
            each.laddr.ip
            for pid in (starter.pid, worker2)
            for each in psutil.Process(pid).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        ]
        status, out, err = starter.end()
    assert len(listens_at) >= 2 and set(listens_at) == {"127.0.0.1"}
    assert "worker1 is lost" in out and "worker2 is lost" in out
    assert status == 1 and "all workers are lost" in err and "loss" not in out


def test_the_workers_end_with_a_leader_that_is_killed(tmp_path):
    with Starter(tmp_path) as starter:
        starter.pid_of("worker1")
        os.kill(starter.pid, signal.SIGKILL)
        status, out, err = starter.end()
    assert status == -signal.SIGKILL and "loss" not in out and "Traceback" not in err


@GROUP
def test_ctrl_c_ends_all_processes_also_in_a_callback(ended):
    """torch only logs an exception that a callback raises, so a KeyboardInterrupt would be lost."""
    done = ended["Ctrl-C in a callback"]
    assert done.returncode == -signal.SIGINT and "loss" not in done.stdout and "Traceback" not in done.stderr


@GROUP
def test_nobody_waits_for_ever_for_a_worker_that_does_not_come(ended):
    done = ended["a worker that does not come"]
    assert done.returncode == 1 and "Timeout (0:00:08)!" in done.stderr and "in init_rpc" in done.stderr
