"""The exercises: each check fails on the code that the exercise starts from, and passes with its solution."""

import concurrent.futures
import shutil
import subprocess
import sys

import pytest
import pytest.__main__

from helpers import PACKAGES, ROOT, load_module, run_warm

exercise = load_module(ROOT / "tests" / "tools" / "exercise.py")
EXERCISES = {f"{p}-{number}": each for p in PACKAGES for number, each in enumerate(exercise.read_page(p), 1)}


def copy_to(folder):
    """Copy what the exercises change and run; return the folder."""
    for name in (*PACKAGES, "bench", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "pictures"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.parametrize("name", EXERCISES)
def test_a_solution_fits_the_code(name, tmp_path):
    """And written into what it was taken out of, it gives the code back, to the letter."""
    each, root = EXERCISES[name], copy_to(tmp_path)
    before = {path: path.read_bytes() for path in root.glob("*/*.py")}
    taken_out = each.start(root)
    assert each.solve(root) and not each.solve(root)
    assert ({path: path.read_bytes() for path in before} == before) == taken_out


def start_and_solved(each, folder):
    """Return two copies: what the exercise starts from, and its solution."""
    start, solved = copy_to(folder / "start"), copy_to(folder / "solved")
    each.start(start)  # False: the code as published has nothing of the solution
    each.solve(solved)  # False: it has it
    return start, solved


def run_check(each, root):
    """Run the check in a process that has torch loaded; return (status, what it printed)."""
    python, m, pytest_, *words = each.command()
    assert (m, pytest_) == ("-m", "pytest")
    out = root / "out.txt"
    out.touch()
    return run_warm([python, pytest.__main__.__file__, *words], out, out, 250, cwd=root), out.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
def test_a_check_fails_at_the_start_and_passes_with_the_solution(name, tmp_path):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        (status, failed), (good, passed) = pool.map(
            lambda root: run_check(EXERCISES[name], root), start_and_solved(EXERCISES[name], tmp_path)
        )
    assert status == 1, failed  # pytest: tests were run, and one failed
    assert good == 0, passed


@pytest.mark.slow
def test_the_command_prints_the_exercise_and_the_verdict(tmp_path):
    """What ./run_all.sh exercise ddp 1 runs."""
    command = [sys.executable, "tests/tools/exercise.py", "ddp", "1"]
    ends = (1, "Not solved yet"), (0, "Solved")
    told = [
        subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        for root in start_and_solved(EXERCISES["ddp_rpc-1"], tmp_path)
    ]
    for process, (status, verdict) in zip(told, ends, strict=True):
        out, _ = process.communicate(timeout=120)
        assert process.returncode == status and out.startswith("## 1. "), out
        assert out.splitlines()[-1].startswith(verdict), out


def test_a_page_has_three_or_four_exercises():
    for package in PACKAGES:
        assert 3 <= len(exercise.read_page(package)) <= 4
