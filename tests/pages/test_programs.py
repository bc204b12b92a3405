"""Every program on every page runs as it is printed there, and prints the output that is shown below it.

A program that is new on a page is found here by itself: tests/harness/pages.py says how. The programs of a page run
together, several of them at the same time. With them run programs of tests/pages/programs, which check what the page
says.
"""

import functools
import os
import re
import shutil
import sys

import pytest

from documented import assert_documented
from helpers import PAGES, ROOT
from jobs import free_port
from pages import Page, imports_of
from programs import run_script

PAGE_OF = {str(path.relative_to(ROOT)): Page(path) for path in PAGES}
CONCEPTS, RECIPES, YOUR_OWN = "docs/CONCEPTS.md", "docs/RECIPES.md", "docs/WRITE_YOUR_OWN.md"
FORTY_LINES = "README.md"  # see test_tutorials.py
QUICK = (RECIPES, "recipes_2.py")  # runs as a user runs it, with "spawn"


def scenes_of(program):
    """Return a command for each scene of a program: see programs/scenes.py."""
    text = (ROOT / "tests" / "pages" / "programs" / program).read_text()
    return [f"{program} {scene}" for scene in re.findall(r"^@scene\(.*\)\ndef (\w+)", text, re.MULTILINE)]


# The lines of the page, in programs that end with these statuses.
SHUTDOWN = {"where_shutdown.py start": 1, "where_shutdown.py raise": 1, "where_shutdown.py exit": 3}
ALSO = {  # what runs together with the programs of a page
    CONCEPTS: [*scenes_of("asked.py"), *SHUTDOWN],
    RECIPES: ["meeting.py", *scenes_of("errors.py"), "farms.py three_die", "farms.py all_die"],
    YOUR_OWN: ["run_pytest.py . test_pool.py", "left_alone.py"],
}
UNNEEDED = ("open_calls.py", "report.py", "training.py")  # files of the glue, as WRITE_YOUR_OWN says
IN_CONCEPTS, IN_RECIPES, IN_YOUR_OWN = map(pytest.mark.xdist_group, (CONCEPTS, RECIPES, YOUR_OWN))


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


def check_alone(path, name, folder, **how):
    """Run one program of a page as a user runs it, and compare what it prints with the page. `how`: see Program."""
    page, env = PAGE_OF[path], {"MASTER_PORT": free_port(), "PYTHONUNBUFFERED": "1"}
    page.write_to(folder)
    page.programs[name].check(run_script(folder / name, cwd=folder, env=env, **how))


def case(path, name):
    """Return a case. Those of a page go to the same worker of pytest-xdist."""
    return pytest.param(path, name, marks=pytest.mark.xdist_group(path), id=f"{path}-{name}")


SHOWN = [(path, name) for path, page in PAGE_OF.items() for name in page.shown() if path != FORTY_LINES]


@pytest.mark.parametrize("path, name", [case(*each) for each in SHOWN if each != QUICK])
def test_a_program_prints_what_the_page_shows(path, name, ran):
    PAGE_OF[path].programs[name].check(ran(path)[name])


@pytest.mark.parametrize("path, name", [case(path, name) for path, names in ALSO.items() for name in names])
def test_a_program_that_checks_what_the_page_says(path, name, ran):
    done = ran(path)[name]
    assert done.returncode == SHUTDOWN.get(name, 0), done.stdout + done.stderr


@pytest.mark.quick
def test_a_recipe_prints_what_the_page_shows_with_spawn(tmp_path):
    check_alone(*QUICK, tmp_path)


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


# ------------------------------------------------------------------------------------------------------------ CONCEPTS


@IN_CONCEPTS
def test_the_profiler_says_that_it_shows_no_rpc(ran):
    assert_documented(ran(CONCEPTS)["asked.py under_the_profiler"].stderr, "Profiling a distributed call")


@IN_CONCEPTS
def test_where_shutdown_stands(ran):
    """With the page's lines, a program ends with its own error, although a call is open."""
    for command, error in zip(SHUTDOWN, ("is not unique", "ValueError: a mistake", ""), strict=True):
        done = ran(CONCEPTS)[command]
        assert error in done.stderr and "During handling" not in done.stderr, done.stderr


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


# ------------------------------------------------------------------------------------------------------ WRITE_YOUR_OWN


@IN_YOUR_OWN
def test_a_function_waits_for_a_gil_that_is_kept_and_an_operator_does_not(ran):
    seconds = re.findall(r"add took (\d+\.\d) s, a function (\d+\.\d) s", ran(YOUR_OWN)["busy.py"].stdout)
    (_, function), (add_with_the_gil, function_with_the_gil) = seconds
    assert max(float(function), float(add_with_the_gil)) < float(function_with_the_gil)


@IN_YOUR_OWN
def test_a_worker_that_was_started_by_itself_ends_with_its_leader(ran):
    done = ran(YOUR_OWN)["left_alone.py"]
    assert done.stdout.endswith("[-9, 1]\n") and "the leader is lost" in done.stdout, done.stdout + done.stderr


def test_a_program_can_be_started_by_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    check_alone(YOUR_OWN, "sent.py", tmp_path, by=torchrun)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_the_shm_transport_does_not_use_dev_shm(tmp_path):
    """This program sends 100 MB over torch's default, which is shm. Here /dev/shm has room for 1 MB."""
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"'
    check_alone(YOUR_OWN, "tensors.py", tmp_path, by=["unshare", "--mount", "sh", "-c", mount, sys.executable])
