"""docs/starter.py: by itself, and with workers and a leader that die, are silent, or make a mistake."""

import re
import shutil
import signal

import pytest

from forks import run_in_forks
from helpers import ROOT
from programs import run_script

STARTER, PROGRAMS = ROOT / "docs" / "starter.py", ROOT / "tests" / "pages" / "programs"
TROUBLES = ("mistake", "ctrl_c", "missing_worker", "killed_workers", "silent_worker", "killed_leader")
GROUP = pytest.mark.xdist_group("starter")
LOSS = "loss 0.9524 with learning rate 0.002"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run starters.py with each of TROUBLES; return {trouble: CompletedProcess}. No process is left then."""
    folder = tmp_path_factory.mktemp("starter")
    shutil.copy(STARTER, folder)
    shutil.copy(PROGRAMS / "starters.py", folder)
    done = run_in_forks(folder, [f"starters.py {trouble}" for trouble in TROUBLES], at_once=3)
    return dict(zip(TROUBLES, done.values(), strict=True))


def rates_in(out):
    return re.findall(r"^worker\d has done (0\.\d+)$", out, re.MULTILINE)


def test_both_workers_train_and_everybody_ends(tmp_path):
    done = run_script(shutil.copy(STARTER, tmp_path), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(set(rates_in(done.stdout))) == len(rates_in(done.stdout)) == 12
    assert sum(map(int, re.findall(r"has done (\d+) tasks", done.stdout))) == 12
    assert LOSS in done.stdout


@GROUP
def test_a_killed_workers_tasks_are_done_by_the_other_one_which_may_die_when_it_has_done_them(ended):
    done = ended["killed_workers"]
    assert done.returncode == 0, done.stderr
    training, _, afterwards = done.stdout.partition(LOSS)
    first, then = (set(re.findall(r"(worker\d) is lost", text)) for text in (training, afterwards))
    assert len(first) == len(then) == 1 and first != then
    assert f"RPC agent for leader encountered error when reading incoming request from {first.pop()}: " in done.stderr
    assert len(set(rates_in(done.stdout))) == len(rates_in(done.stdout)) == 12  # each one, and none of them twice
    assert "Traceback" not in done.stderr


@GROUP
def test_a_mistake_in_a_method_is_shown_with_the_worker_and_the_line(ended):
    done = ended["mistake"]
    assert done.returncode == 1 and "is lost" not in done.stdout
    assert re.search(r"^worker\d has failed at 0\.0\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"On WorkerInfo\(id=\d, name=worker\d\):", done.stderr)
    lines = STARTER.read_text().splitlines()
    line = 1 + lines.index("            residuals = self.x[batch] @ weights - self.y[batch]")
    assert f'starter.py", line {line}, in work' in done.stderr and "size mismatch" in done.stderr


@GROUP
def test_a_silent_worker_is_given_up_and_without_any_worker_the_program_fails(ended):
    done = ended["silent_worker"]
    assert done.returncode == 1 and "all workers are lost" in done.stderr and "loss" not in done.stdout
    assert "worker1 is lost" in done.stdout and "worker2 is lost" in done.stdout
    assert "listen at: {'127.0.0.1'}" in done.stdout


@GROUP
def test_the_workers_end_with_a_leader_that_is_killed(ended):
    done = ended["killed_leader"]
    assert done.returncode == -signal.SIGKILL and "loss" not in done.stdout and "Traceback" not in done.stderr


@GROUP
def test_ctrl_c_ends_all_processes_also_in_a_callback(ended):
    """torch only logs an exception that a callback raises, so a KeyboardInterrupt would be lost."""
    done = ended["ctrl_c"]
    assert done.returncode == -signal.SIGINT and "loss" not in done.stdout and "Traceback" not in done.stderr


@GROUP
def test_nobody_waits_for_ever_for_a_worker_that_does_not_come(ended):
    done = ended["missing_worker"]
    assert done.returncode == 1 and "Timeout (0:00:03)!" in done.stderr and "in init_rpc" in done.stderr
