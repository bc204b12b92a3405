"""The exercises: each check fails on the code that the exercise starts from, and passes with its solution."""

import shutil
import subprocess

import pytest

from helpers import PACKAGES, ROOT, load_module

exercise = load_module(ROOT / "tests" / "tools" / "exercise.py")
EXERCISES = {f"{p}-{number}": each for p in PACKAGES for number, each in enumerate(exercise.read_page(p), 1)}
CHEAP = ("ddp_rpc-1",)


def copy_to(folder):
    """Copy what the exercises change and run; return the folder."""
    for name in (*PACKAGES, "tests"):
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


@pytest.mark.parametrize(
    "name", [each if each in CHEAP else pytest.param(each, marks=pytest.mark.slow) for each in EXERCISES]
)
def test_a_check_fails_at_the_start_and_passes_with_the_solution(name, tmp_path):
    """Both at once: what takes time is that each loads torch."""
    each, start, solved = EXERCISES[name], copy_to(tmp_path / "start"), copy_to(tmp_path / "solved")
    each.start(start)  # False: the code as published has nothing of the solution
    each.solve(solved)  # False: it has it
    checks = [each.start_check(root, stdout=subprocess.PIPE, text=True) for root in (start, solved)]
    (failed, _), (passed, _) = (check.communicate(timeout=250) for check in checks)
    assert checks[0].returncode == 1, failed  # pytest: tests were run, and one failed
    assert checks[1].returncode == 0, passed


def test_a_page_has_three_or_four_exercises():
    for package in PACKAGES:
        assert 3 <= len(exercise.read_page(package)) <= 4
