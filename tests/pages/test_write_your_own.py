"""docs/WRITE_YOUR_OWN.md: every program runs as printed on the page, and prints the output that is shown below it."""

import os
import re
import shutil
import signal
import sys

import pytest

from forks import run_in_forks
from helpers import ROOT
from jobs import free_port
from programs import Program, run_script
from tutorials import changed

PAGE = (ROOT / "docs" / "WRITE_YOUR_OWN.md").read_text()
BLOCK = r"(?ms)^```python\n# (\w+\.py)\n(.*?)^```\n\n(?:`torchrun[^\n]+\n\n)?(?:```text\n(.*?)^```)?"
PROGRAMS = {name: found for name, *found in re.findall(BLOCK, PAGE)}  # program, output
SHOWN = [name for name, (_, output) in PROGRAMS.items() if output]
UNNEEDED = ("open_calls.py", "report.py", "finite.py", "seeds.py")  # files of the glue
TIME = r"\b(\d+\.\d) m?s\b"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with all programs of the page, and what they need."""
    tmp_path = tmp_path_factory.mktemp("programs")
    for name, (program, _) in PROGRAMS.items():
        (tmp_path / name).write_text(program)
    (tmp_path / "squares.py").write_text("def square(x):\n    return x * x\n")
    shutil.copy(ROOT / "docs" / "pool.py", tmp_path)
    shutil.copytree(ROOT / "rl_rpc/glue", tmp_path / "glue", ignore=shutil.ignore_patterns(*UNNEEDED))
    return tmp_path


@pytest.fixture(scope="module")
def in_forks(folder):
    """Run the programs but sent.py, which is for torchrun; return {name: CompletedProcess}."""
    return run_in_forks(folder, [name for name in SHOWN if name != "sent.py"])


@pytest.mark.xdist_group("programs")
@pytest.mark.parametrize("name", SHOWN)
def test_a_program_prints_what_the_page_shows(name, folder, request):
    if name == "sent.py":
        done = run_script(folder / name, cwd=folder, by=[*TORCHRUN, "--master-port", free_port()])
    else:
        done = request.getfixturevalue("in_forks")[name]
    assert done.returncode == 0, done.stderr
    assert re.sub(TIME, "… s", done.stdout) == re.sub(TIME, "… s", PROGRAMS[name][1])
    if name == "busy.py":  # a function waits until the lock is free, an operator does not
        *_, add_with_the_lock, function_with_the_lock = map(float, re.findall(TIME, done.stdout))
        assert add_with_the_lock < function_with_the_lock


def test_the_tests_of_the_page_pass(folder):
    done = run_script(folder / "test_pool.py", by=[sys.executable, "-m", "pytest", "-q"], cwd=folder, timeout=300)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_a_worker_in_another_terminal_ends_with_its_leader(tmp_path):
    program = changed(shutil.copy(ROOT / "docs" / "pool.py", tmp_path), ('["worker1", "worker2"]', '["worker1"]'))
    port = free_port()
    ranks = [Program(program, cwd=tmp_path, env={"RANK": rank, "MASTER_PORT": port}) for rank in range(2)]
    with ranks[0] as leader, ranks[1] as worker:
        assert leader.wait_for_text("worker1 has done", 90), leader.text()
        os.kill(leader.pid, signal.SIGKILL)
        assert worker.wait(60) == 1 and "the leader is lost" in worker.output()
