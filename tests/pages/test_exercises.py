"""Exercises: each diff fits the code, and each check tells whether the exercise is solved."""

import re
import shlex
import shutil
import subprocess

import pytest

from forks import run_in_forks
from helpers import PACKAGES, ROOT


def git_apply(root, *words):
    return subprocess.run(["git", "apply", *words], cwd=root, capture_output=True, text=True)


def exercises_of(package):
    """Yield for each exercise its diff's path, the words of its check, and whether the code contains the solution."""
    page = (ROOT / "docs" / "exercises" / f"{package}.md").read_text()
    numbers = re.findall(r"^## (\d+)\. ", page, re.MULTILINE)
    checks = re.findall(r"^Check: `python -m pytest (.+)`$", page, re.MULTILINE)
    links = re.findall(r"^Solution: \[(\w+/\d\.diff)\]\(\1\)$", page, re.MULTILINE)
    assert links == [f"{package}/{number}.diff" for number in numbers] and len(checks) == len(numbers)
    for link, check in zip(links, checks, strict=True):
        diff = f"docs/exercises/{link}"
        yield diff, shlex.split(check), git_apply(ROOT, "--check", "-R", diff).returncode == 0


@pytest.mark.quick
@pytest.mark.parametrize("package", PACKAGES)
def test_each_solution_fits_the_code(package):
    exercises = [*exercises_of(package)]
    assert len(exercises) == 4
    for diff, _, is_published in exercises:
        assert is_published or git_apply(ROOT, "--check", diff).stderr == ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("packages", [PACKAGES[:2], PACKAGES[2:]], ids="-".join)
def test_a_check_passes_with_the_solution(packages, tmp_path):
    """If the code contains the solution, the check is one of its own tests."""
    shutil.copy(ROOT / "tests" / "pages" / "programs" / "run_pytest.py", tmp_path)
    commands = []
    for package in packages:
        exercises = [(diff, check) for diff, check, is_published in exercises_of(package) if not is_published]
        assert exercises, f"nothing would be checked of {package}"
        for diff, check in exercises:
            root = tmp_path / str(len(commands))
            for name in (*PACKAGES, "bench", "docs", "tests", "tools"):
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "pictures"))
            shutil.copy(ROOT / "pyproject.toml", root)
            assert git_apply(root, diff).returncode == 0
            commands.append(shlex.join(["run_pytest.py", root.name, *check]))
    done = run_in_forks(tmp_path, commands, seconds=280)
    assert [each.stdout for each in done.values() if each.returncode] == []
