"""docs/starter.py: by itself, and with workers and a leader that die, are silent, or make a mistake."""

import re
import shutil
import signal

import pytest

from forks import run_in_forks
from helpers import ROOT
from programs import run_script
from two_hosts import watched_host

STARTER, PROGRAMS = ROOT / "docs" / "starter.py", ROOT / "tests" / "pages" / "programs"
LOSS = "loss 0.9524 with learning rate 0.002"
MISTAKE = "            residuals = self.x[batch] @ weights - self.y[batch]"
LINE = 1 + STARTER.read_text().splitlines().index(MISTAKE)
TROUBLES = {  # what goes wrong -> the status; patterns of what is printed; and what is not printed
    "mistake": (
        1,
        [
            r"(?m)^worker\d has failed at 0\.0\d+$",
            r"On WorkerInfo\(id=\d, name=worker\d\):",
            rf'starter.py", line {LINE}, in work',
            "size mismatch",
        ],
        ["is lost"],
    ),
    "ctrl_c": (-signal.SIGINT, [], ["loss", "Traceback"]),  # torch only logs what a callback raises
    "missing_worker": (1, [r"Timeout \(0:00:03\)!", "in init_rpc"], []),
    "killed_workers": (0, [], ["Traceback"]),
    "silent_worker": (1, ["all workers are lost", "worker1 is lost", "worker2 is lost"], ["loss 0"]),
    "killed_leader": (-signal.SIGKILL, [], ["loss", "Traceback"]),
}


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
    with watched_host() as by:
        done = run_script(shutil.copy(STARTER, tmp_path), cwd=tmp_path, by=by)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(set(rates_in(done.stdout))) == len(rates_in(done.stdout)) == 12
    assert sum(map(int, re.findall(r"has done (\d+) tasks", done.stdout))) == 12
    assert LOSS in done.stdout


@pytest.mark.xdist_group("starter")
@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_ends_the_program(trouble, ended):
    status, printed, not_printed = TROUBLES[trouble]
    done = ended[trouble]
    text = done.stdout + done.stderr
    assert done.returncode == status, text
    assert not [pattern for pattern in printed if not re.search(pattern, text)], text
    assert not [words for words in not_printed if words in text], text


@pytest.mark.xdist_group("starter")
def test_a_killed_workers_tasks_are_done_by_the_other_one_which_may_die_when_it_has_done_them(ended):
    done = ended["killed_workers"]
    training, _, afterwards = done.stdout.partition(LOSS)
    first, then = (set(re.findall(r"(worker\d) is lost", text)) for text in (training, afterwards))
    assert len(first) == len(then) == 1 and first != then
    assert f"RPC agent for leader encountered error when reading incoming request from {first.pop()}: " in done.stderr
    assert len(set(rates_in(done.stdout))) == len(rates_in(done.stdout)) == 12  # each one, and none of them twice
