"""Exercises: each diff fits the code, and each check tells whether the exercise is solved."""

import re
import shlex
import shutil
import subprocess
from typing import NamedTuple

import pytest

from forks import run_in_forks
from helpers import PACKAGES, ROOT


class Exercise(NamedTuple):
    diff: str  # its path in the repository
    check: list  # the words of a pytest command
    is_published: bool  # the code contains the solution


def git_apply(root, *words):
    return subprocess.run(["git", "apply", *words], cwd=root, capture_output=True, text=True)


def exercises_of(package):
    page = (ROOT / "docs" / "exercises" / f"{package}.md").read_text()
    numbers = re.findall(r"^## (\d+)\. ", page, re.MULTILINE)
    checks = re.findall(r"^Check: `python -m pytest (.+)`$", page, re.MULTILINE)
    links = re.findall(r"^Solution: \[(\w+/\d\.diff)\]\(\1\)$", page, re.MULTILINE)
    assert links == [f"{package}/{number}.diff" for number in numbers] and len(checks) == len(numbers)
    for link, check in zip(links, checks, strict=True):
        diff = f"docs/exercises/{link}"
        yield Exercise(diff, shlex.split(check), git_apply(ROOT, "--check", "-R", diff).returncode == 0)


def copy_to(folder):
    for name in (*PACKAGES, "bench", "docs", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "pictures"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.quick
@pytest.mark.parametrize("package", PACKAGES)
def test_each_solution_fits_the_code(package, tmp_path):
    root = copy_to(tmp_path)
    before = {path: path.read_bytes() for path in root.glob("*/*.py")}
    exercises = [*exercises_of(package)]
    assert len(exercises) == 4
    for exercise in exercises:
        there_and_back = [["-R"], []] if exercise.is_published else [[], ["-R"]]
        for direction in there_and_back:
            assert git_apply(root, *direction, exercise.diff).stderr == ""
        assert {path: path.read_bytes() for path in root.glob("*/*.py")} == before


@pytest.mark.timeout(600)
@pytest.mark.parametrize("packages", [PACKAGES[:2], PACKAGES[2:]], ids="-".join)
def test_a_check_passes_with_the_solution(packages, tmp_path):
    """If the code contains the solution, the check is one of its own tests."""
    shutil.copy(ROOT / "tests" / "pages" / "programs" / "run_pytest.py", tmp_path)
    commands = []
    for package in packages:
        exercises = [exercise for exercise in exercises_of(package) if not exercise.is_published]
        assert exercises, f"nothing would be checked of {package}"
        for exercise in exercises:
            root = copy_to(tmp_path / str(len(commands)))
            assert git_apply(root, exercise.diff).returncode == 0
            commands.append(shlex.join(["run_pytest.py", root.name, *exercise.check]))
    done = run_in_forks(tmp_path, commands, seconds=280)
    assert [each.stdout for each in done.values() if each.returncode] == []
