"""Every program on every page runs as it is printed there, and prints the output that is shown below it.

A program that is new on a page is found here by itself: tests/harness/pages.py says how. The programs of a page run
together, several of them at the same time, and so do the programs of tests/pages/programs that are named here.
"""

import functools
import json
import re
import shutil
import sys

import pytest

from helpers import PAGES, ROOT
from jobs import free_port
from pages import Page, imports_of
from programs import run_script

PAGE_OF = {str(path.relative_to(ROOT)): Page(path) for path in PAGES}
RECIPES, YOUR_OWN = "docs/RECIPES.md", "docs/WRITE_YOUR_OWN.md"
FORTY_LINES = "README.md"  # see test_tutorials.py
QUICK = (RECIPES, "recipes_2.py")  # runs as a user runs it, with "spawn"
ALSO = {  # what runs together with the programs of a page
    RECIPES: ["meeting.py", "errors.py", "farms.py three_die", "farms.py all_die"],
    YOUR_OWN: ["run_pytest.py . test_pool.py", "left_alone.py"],
}
UNNEEDED = ("open_calls.py", "report.py", "training.py")  # files of the glue, as WRITE_YOUR_OWN says
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
IN_RECIPES, IN_YOUR_OWN = pytest.mark.xdist_group(RECIPES), pytest.mark.xdist_group(YOUR_OWN)


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """Return a function that runs the programs of a page, and ALSO's, once; it returns {command: CompletedProcess}."""

    def run(path):
        folder = tmp_path_factory.mktemp("programs")
        if path == YOUR_OWN:
            (folder / "squares.py").write_text("def square(x):\n    return x * x\n")
            shutil.copy(ROOT / "docs" / "pool.py", folder)
            shutil.copytree(ROOT / "rl_rpc/glue", folder / "glue", ignore=shutil.ignore_patterns(*UNNEEDED))
        return PAGE_OF[path].run(folder, ALSO.get(path, ()))

    return functools.cache(run)


def cases():
    """Return a case for each program. Those of a page go to the same worker of pytest-xdist."""
    return [
        pytest.param(path, name, marks=pytest.mark.xdist_group(path), id=f"{path}-{name}")
        for path, page in PAGE_OF.items()
        for name in page.shown()
        if path != FORTY_LINES and (path, name) != QUICK
    ]


@pytest.mark.parametrize("path, name", cases())
def test_a_program_prints_what_the_page_shows(path, name, ran):
    PAGE_OF[path].programs[name].check(ran(path)[name])


@pytest.mark.quick
def test_a_recipe_prints_what_the_page_shows_with_spawn(tmp_path):
    path, name = QUICK
    PAGE_OF[path].write_to(tmp_path)
    done = run_script(tmp_path / name, cwd=tmp_path, env={"MASTER_PORT": free_port(), "PYTHONUNBUFFERED": "1"})
    PAGE_OF[path].programs[name].check(done)


@pytest.mark.quick
@pytest.mark.parametrize("path", [path for path, page in PAGE_OF.items() if page.programs])
def test_the_programs_of_a_page_need_torch_alone_and_listen_on_loopback_only(path):
    programs = PAGE_OF[path].programs
    known = {"torch", "glue", "squares", "pool", "pytest", *(name.removesuffix(".py") for name in programs)}
    for name, (text, _) in programs.items():
        imported = imports_of(text)
        assert imported <= known | set(sys.stdlib_module_names), name
        if "rpc.init_rpc(" in text and not imported & {"two", "glue"}:
            assert 'TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo"' in text, name


# ------------------------------------------------------------------------------------------------------------- RECIPES


@pytest.mark.quick
def test_the_list_of_contents_names_every_recipe():
    text = PAGE_OF[RECIPES].text
    listed = re.findall(r"^(\d+)\. \[(.+)\]\(#.+\)$", text, re.MULTILINE)
    assert listed == re.findall(r"^## (\d+)\. (.+)$", text, re.MULTILINE)
    assert PAGE_OF[RECIPES].shown() == [f"recipes_{n}.py" for n in range(1, len(listed) + 1)]


@IN_RECIPES
def test_both_stages_of_the_pipeline_work_at_the_same_time(ran):
    PAGE_OF[RECIPES].programs["recipes_9.py"].check(ran(RECIPES)["meeting.py"])


@IN_RECIPES
def test_tasks_of_workers_that_die_go_to_others(ran):
    """Three workers die in the middle of a task, the last two together. The last task cannot even be sent."""
    done = ran(RECIPES)["farms.py three_die"]
    assert done.returncode == 0, done.stderr
    results = dict(line.split(": ") for line in done.stdout.splitlines())
    assert results.pop("statuses") == "[0]"  # of the only worker that is left
    again = {"kills its worker", "task 5", "task 12", "task 13"}
    failed = dict.fromkeys(["raises", "<lambda>"], "failed")
    assert results == {task: f"{task.upper()} (attempt {1 + (task in again)})" for task in results} | failed
    assert len(results) == 24


@IN_RECIPES
def test_a_recipe_whose_workers_have_all_died_says_so(ran):
    done = ran(RECIPES)["farms.py all_die"]
    assert done.returncode == 0, done.stderr
    results = ["a: A (attempt 1)", "kills its worker: no worker is left", "b: no worker is left", "statuses: []"]
    assert done.stdout.splitlines() == results


@IN_RECIPES
def test_the_table_quotes_what_the_exceptions_say(ran):
    section = PAGE_OF[RECIPES].text.partition("\n## 14. ")[2]
    rows = [row.split(" | ")[1] for row in re.findall(r"^\| .* \|$", section, re.MULTILINE)[1:]]
    raised, result, arguments, late, killed, _ = [re.findall(r"`([^`]+)`", row) for row in rows]
    done = ran(RECIPES)["errors.py"]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 12, done.stderr
    for errors in lines[:6], lines[6:]:
        said = [text for *_, text, _ in errors]
        assert [what for *_, what in errors] == ["failed", "failed", "failed", "failed", "timed out", "lost"]
        assert [raised_by for raised_by, *_ in errors] == ["wait", "wait", "wait", "rpc_async", "wait", "wait"]
        classes = [name for raised_by, name, *_ in errors if raised_by == "wait"]
        assert classes == ["RuntimeError", "ValueError", "RuntimeError", "RuntimeError", "RuntimeError"]
        assert raised[0] in said[0] and raised[0] in said[1]
        assert result[0] in said[2] and result[1] not in said[2]
        assert arguments[1] in said[3] and late[0] in said[4] and killed[0] in said[5]
        assert said[5].startswith(tuple(killed[1:]))


# ------------------------------------------------------------------------------------------------------ WRITE_YOUR_OWN


@IN_YOUR_OWN
def test_a_function_waits_for_a_gil_that_is_kept_and_an_operator_does_not(ran):
    seconds = re.findall(r"add took (\d+\.\d) s, a function (\d+\.\d) s", ran(YOUR_OWN)["busy.py"].stdout)
    (_, function), (add_with_the_gil, function_with_the_gil) = seconds
    assert max(float(function), float(add_with_the_gil)) < float(function_with_the_gil)


@IN_YOUR_OWN
def test_the_tests_of_the_page_pass(ran):
    done = ran(YOUR_OWN)[ALSO[YOUR_OWN][0]]
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


@IN_YOUR_OWN
def test_a_worker_that_was_started_by_itself_ends_with_its_leader(ran):
    done = ran(YOUR_OWN)["left_alone.py"]
    assert done.stdout.endswith("[-9, 1]\n") and "the leader is lost" in done.stdout, done.stdout + done.stderr


def test_a_program_can_be_started_by_torchrun(tmp_path):
    PAGE_OF[YOUR_OWN].write_to(tmp_path)
    done = run_script(tmp_path / "sent.py", cwd=tmp_path, by=[*TORCHRUN, "--master-port", free_port()])
    PAGE_OF[YOUR_OWN].programs["sent.py"].check(done)
