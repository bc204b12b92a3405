"""Exercises: the check of each fails on the code from which it starts, and passes with its solution."""

import re
import shutil
import subprocess

import pytest
import pytest.__main__

from helpers import PACKAGES, ROOT, load_module
from programs import run_script

exercise = load_module(ROOT / "tools" / "exercise.py")
EXERCISES = {f"{p}-{number}": each for p in PACKAGES for number, each in enumerate(exercise.read_page(p), 1)}


def copy_to(folder):
    """Copy the files that the exercises change and run into `folder`, and return it."""
    for name in (*PACKAGES, "bench", "docs", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "pictures"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.parametrize("name", EXERCISES)
def test_a_solution_fits_the_code(name, tmp_path):
    """If the solution is removed from the code and applied again, the code is the same as before."""
    each, root = EXERCISES[name], copy_to(tmp_path)
    before = {path: path.read_bytes() for path in root.glob("*/*.py")}
    was_removed = each.start(root)
    assert each.solve(root) and not each.solve(root)
    assert ({path: path.read_bytes() for path in before} == before) == was_removed


def start_and_solved(each, folder):
    """Return two copies: the code from which the exercise starts, and the code with its solution."""
    start, solved = copy_to(folder / "start"), copy_to(folder / "solved")
    each.start(start)  # returns False if the published code does not contain the solution
    each.solve(solved)  # returns False if the published code contains it already
    return start, solved


def run_check(each, root):
    """Run the check in a fork of a process that has loaded torch. Return (status, output)."""
    _, m, pytest_, *words = each.command()
    assert (m, pytest_) == ("-m", "pytest")
    done = run_script(pytest.__main__.__file__, *words, cwd=root, timeout=250)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
@pytest.mark.draw(2)
def test_a_check_fails_at_the_start_and_passes_with_the_solution(name, tmp_path):
    each = EXERCISES[name]
    start, solved = start_and_solved(each, tmp_path)
    status, failed = run_check(each, start)
    assert status == 1, failed  # pytest: tests were run, and one failed
    if each.is_as_published() and "exercises.py" not in each.check:
        return  # the solved code is this repository's, whose tests contain the check
    good, passed = run_check(each, solved)
    assert good == 0, passed


def command(root, *words):
    """Run the command of ./run_all.sh exercise WORDS. Return (status, output)."""
    done = run_script(root / "tools" / "exercise.py", *words, cwd=root)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_the_command_prints_the_exercise_and_the_verdict(tmp_path):
    root = copy_to(tmp_path)
    for action, status, verdict in [("start", 1, "Not solved yet"), ("solution", 0, "Solved")]:
        assert command(root, "ddp", "1", action) == (0, "")
        ended, out = command(root, "ddp", "1")
        assert (ended, out[:6]) == (status, "## 1. "), out
        assert out.splitlines()[-1].startswith(verdict), out
    assert states_in(command(root, "list")[1]) == dict.fromkeys(NAMES, "not done") | {"ddp 1": "done"}


def states_in(out):
    """Return {name: state} from the output of `exercise list`."""
    return dict(re.findall(r"^(\w+ \d)  .* {2,}(\S.*)$", out, re.MULTILINE))


NAMES = list(exercise.all_exercises())
# Replaces pytest, so that the tests of the list take seconds. It logs each check, and passes those of passes.txt.
STAND_IN = """
import pathlib, sys
with open("checks.txt", "a") as file:
    print(*sys.argv[1:], file=file)
sys.exit(pathlib.Path("passes.txt").read_text() not in " ".join(sys.argv))
"""


@pytest.fixture
def listed(tmp_path):
    """A copy in a git repository. `listed()` returns ({name: state}, the checks that were run)."""
    root = copy_to(tmp_path)
    (root / "pytest.py").write_text(STAND_IN)
    (root / "passes.txt").write_text("no check")
    commit = ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "as published"]
    for words in (["init", "-q"], ["add", "."], commit):
        subprocess.run(["git", *words], cwd=root, check=True)

    def run_list():
        (root / "checks.txt").write_text("")
        status, out = command(root, "list")
        assert status == 0
        return states_in(out), (root / "checks.txt").read_text().splitlines()

    run_list.root = root
    return run_list


def put_back(root):
    subprocess.run(["git", "checkout", "-q", "."], cwd=root, check=True)


def test_where_nothing_is_changed_no_exercise_is_done_and_no_check_is_run(listed):
    states, checks = listed()
    assert states == dict.fromkeys(NAMES, "not done") and checks == []


def test_a_solved_exercise_is_done_and_stays_done_when_the_code_is_put_back(listed):
    command(listed.root, "rl", "3", "start")
    states, checks = listed()
    assert states == dict.fromkeys(NAMES, "not done") | {"rl 3": "not done: its check fails"}
    assert [words.split()[-1] for words in checks] == ["answers"]
    (listed.root / "passes.txt").write_text("batched or answers")
    assert listed()[0] == states | {"rl 3": "done"}
    put_back(listed.root)
    assert listed() == (dict.fromkeys(NAMES, "not done") | {"rl 3": "done"}, [])


def test_the_published_solution_is_not_taken_for_the_readers(listed):
    (listed.root / "passes.txt").write_text("")  # every check passes
    status, out = command(listed.root, "rl", "3")
    assert status == 0 and out.splitlines()[-1].startswith("The check passes: the published solution is in the code.")
    assert listed() == (dict.fromkeys(NAMES, "not done"), [])


def test_an_exercise_that_was_given_up_is_not_done(listed):
    """The reader has restored the published code, so the check passes again."""
    (listed.root / "passes.txt").write_text("batched or answers")
    command(listed.root, "rl", "3", "start")
    put_back(listed.root)
    assert listed() == (dict.fromkeys(NAMES, "not done"), [])
    command(listed.root, "rl", "4", "start")
    states, checks = listed()
    assert states["rl 3"] == "not done" and [words.split()[-1] for words in checks] == ["rollout"]


def test_without_git_the_list_knows_what_was_checked(listed):
    shutil.rmtree(listed.root / ".git")
    (listed.root / "passes.txt").write_text("last_reference")
    assert listed() == (dict.fromkeys(NAMES, "not done"), [])
    assert "not a git repository" in command(listed.root, "list")[1]
    status, out = command(listed.root, "rl", "1")
    assert status == 0 and "Solved" in out
    assert listed() == (dict.fromkeys(NAMES, "not done") | {"rl 1": "done"}, [])


@pytest.mark.parametrize("package", PACKAGES)
def test_each_section_of_a_page_links_to_its_solution(package):
    page = (ROOT / "docs" / "exercises" / f"{package}.md").read_text()
    numbers = re.findall(r"^## (\d+)\. ", page, re.MULTILINE)
    assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
    links = [f"Solution: [{package}/{n}.diff]({package}/{n}.diff)" for n in numbers]
    assert re.findall("^Solution: .*$", page, re.MULTILINE) == links
    diffs = {path.name for path in (ROOT / "docs" / "exercises" / package).iterdir()}
    assert diffs == {f"{n}.diff" for n in numbers}
