"""docs/RECIPES.md: every program runs as printed on the page, and prints the output that is shown below it."""

import ast
import os
import re
import signal
import sys

import pytest

from forks import run_in_forks
from helpers import ROOT
from jobs import free_port
from programs import Program, run_script
from tutorials import FORKED, changed

PAGE = (ROOT / "docs" / "RECIPES.md").read_text()
RECIPE = re.compile(
    r"^## (\d+)\. ([^\n]+)\n(.*?)^```python\n(.*?)^```\n\n^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
RECIPES = {int(number): found for number, *found in RECIPE.findall(PAGE)}  # title, text, program, output
PIPELINE, FARM = 9, 14


def masked(output):
    """Replace what may differ from run to run: a number of seconds with a decimal point."""
    return re.sub(r"\b\d+\.\d+ s\b", "… s", output)


def check(number, done):
    assert done.returncode == 0, done.stderr
    assert masked(done.stdout) == masked(RECIPES[number][3])


@pytest.fixture(scope="module")
def in_forks(tmp_path_factory):
    """Run the recipes but those of UNCHANGED, and ERRORS; return {name of the file: CompletedProcess}."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "errors.py").write_text(ERRORS)
    for n in RECIPES.keys() - {*UNCHANGED}:
        (folder / f"{n}.py").write_text(RECIPES[n][2] + END)
        changed(folder / f"{n}.py", STORE, FORKED, ("nprocs=", "join=False, nprocs="), *MEETING * (n == PIPELINE))
    return run_in_forks(folder, sorted(os.listdir(folder)))


# The parent has the store, as with torchrun, because rank 0 may end before rank 1 does (docs/TROUBLESHOOTING.md).
STORE = ("    mp.spawn(", "    os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'True'\n    ranks = mp.spawn(")
END = "    from torch.distributed import TCPStore\n\n    store = TCPStore('localhost', int(os.environ['MASTER_PORT']), "
END += "is_master=True)\n    while not ranks.join():\n        pass\n"  # after the forks: they do not get its threads
QUICK = 2
UNCHANGED = (QUICK, FARM)  # the farm starts its workers in another way
GROUP = pytest.mark.xdist_group("recipes")


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.quick if n == QUICK else GROUP) for n in RECIPES if n != PIPELINE]
)
def test_a_recipe_prints_what_the_page_shows(number, tmp_path, request):
    if number in UNCHANGED:
        (tmp_path / "recipe.py").write_text(RECIPES[number][2])
        environ = {"MASTER_PORT": free_port(), "PYTHONUNBUFFERED": "1"}  # see run_in_forks
        check(number, run_script(tmp_path / "recipe.py", env=environ, cwd=tmp_path))
    else:
        check(number, request.getfixturevalue("in_forks")[f"{number}.py"])


MEET = """
calls = itertools.count(1)


def meet(x):
    if len(x) != 2:
        return
    store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    me, call = rpc.get_worker_info().name, next(calls)
    store.set(f"{me}, call {call}", "has begun")
    if me == "worker1" and call > 1:
        store.wait([f"worker2, call {call - 1}"], datetime.timedelta(seconds=20))
    if me == "worker2" and call < 4:
        store.wait([f"worker1, call {call + 1}"], datetime.timedelta(seconds=20))
"""
MEETING = [("import os\n", "import datetime\nimport itertools\nimport os\n"), ("\nlayer = ", MEET + "\n\nlayer = ")]
MEETING += [("time.sleep(0.05 * len(x))", "meet(x)")]


@GROUP
def test_both_stages_of_the_pipeline_work_at_the_same_time_and_print_what_the_page_shows(in_forks):
    """Instead of sleeping, each stage waits until the other has begun with the next or the previous micro-batch."""
    check(PIPELINE, in_forks[f"{PIPELINE}.py"])


def test_tasks_of_workers_that_are_killed_from_outside_go_to_others(tmp_path):
    """Three workers are killed, the last two together, each in the middle of a task, which is then handed out again.

    The last task cannot be pickled, so that it cannot even be sent.
    """
    waits = "    if task in ('task 5', 'task 12', 'task 13') and attempt == 1:\n"
    waits += "        print(task, 'waits in process', os.getpid(), flush=True)\n        time.sleep(3600)\n"
    works, tasks = "    return task.upper()", '*(f"task {i}" for i in range(20)), lambda: None]'
    (tmp_path / "recipe.py").write_text(RECIPES[FARM][2])
    changed(tmp_path / "recipe.py", (works, waits + works), ('"takes too long", "b"]', tasks))
    changed(tmp_path / "recipe.py", ("(size=4)", "(size=5)"), ("timeout=3)", "timeout=60)"))
    with Program(tmp_path / "recipe.py", env={"MASTER_PORT": free_port()}, cwd=tmp_path) as running:
        for tasks in (["task 5"], ["task 12", "task 13"]):
            for task in tasks:
                assert running.wait_for_text(f"{task} waits in process", 60), running.text()
            for task in tasks:
                os.kill(int(re.search(rf"{task} waits in process (\d+)", running.output())[1]), signal.SIGKILL)
        assert running.wait(60) == 0, running.text()
        lines = running.output().splitlines()
    assert lines[-1] == "all workers ended with status 0: True"
    results = dict(line.split(": ") for line in lines if "waits in process" not in line)
    assert results["kills its worker"] == "KILLS ITS WORKER (attempt 2)" and results["raises"] == "failed"
    assert [results[task] for task in results if "lambda" in task] == ["failed"]
    again = [i for i in range(20) if results[f"task {i}"] == f"TASK {i} (attempt 2)"]
    once = [i for i in range(20) if results[f"task {i}"] == f"TASK {i} (attempt 1)"]
    assert again == [5, 12, 13] and len(once) == 17


def test_a_recipe_whose_workers_have_all_died_says_so(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPES[FARM][2])
    changed(tmp_path / "recipe.py", ("(size=4)", "(size=1)"), ('"raises", "takes too long", ', ""))
    done = run_script(tmp_path / "recipe.py", env={"MASTER_PORT": free_port()}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tasks = done.stdout.splitlines()[:-1]
    assert tasks == ["a: A (attempt 1)", "kills its worker: no worker is left", "b: no worker is left"]


ERRORS = """
import os
import signal
import tempfile
import time

import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def work(task):
    if task == "raises":
        raise KeyError(task)
    if task == "raises a ValueError":
        raise ValueError(task)
    if task == "returns what cannot be pickled":
        return lambda: None
    if task == "takes long":
        time.sleep(3)
    if task == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)


def run(rank, transport, folder):
    options = rpc.TensorPipeRpcBackendOptions(_transports=[transport], init_method=f"file://{folder}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    tasks = ["raises", "raises a ValueError", "returns what cannot be pickled", lambda: None, "takes long", "is killed"]
    for task in tasks * (rank == 0):
        sent = "rpc_async"
        try:
            future = rpc.rpc_async("worker1", work, (task,), timeout=1)
            sent = "wait"
            future.wait()
        except Exception as error:
            print(sent, type(error).__name__, " ".join(str(error).split()), flush=True)
    time.sleep(60 * rank)
    os._exit(0)


if __name__ == "__main__":
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    for transport in "uv", "shm":
        with tempfile.TemporaryDirectory() as folder:
            ranks = [mp.get_context("fork").Process(target=run, args=(rank, transport, folder)) for rank in (0, 1)]
            for rank in ranks:
                rank.start()
            ranks[0].join()
            ranks[1].kill()
"""


@GROUP
def test_the_table_quotes_what_the_exceptions_say(in_forks):
    lines = in_forks["errors.py"].stdout.splitlines()
    assert len(lines) == 12
    over_tcp, in_shared_memory = lines[:6], lines[6:]
    for function, value_error, result, arguments, late, killed in (over_tcp, in_shared_memory):
        rows = [row.split(" | ")[1] for row in re.findall(r"^\| .* \|$", RECIPES[FARM][1], re.MULTILINE)[1:]]
        texts = [re.findall(r"`([^`]+)`", row) for row in rows]
        assert texts[0][0] in function and function.startswith("wait RuntimeError")
        assert texts[0][0] in value_error and value_error.startswith("wait ValueError")
        assert texts[1][0] in result and result.startswith("wait RuntimeError") and texts[1][1] not in result
        assert arguments.startswith("rpc_async ") and texts[2][1] in arguments
        assert texts[3][0] in late and late.startswith("wait RuntimeError")
        assert texts[4][0] in killed and killed.startswith("wait RuntimeError")
        assert any(killed.startswith(f"wait RuntimeError {begin}") for begin in texts[4][1:])
        page = {}
        exec(RECIPES[FARM][2].partition("class Coordinator")[0], page)
        errors = (function, value_error, result, late, killed)
        found = [page["what_happened"](line.partition(" ")[2]) for line in errors]
        assert found == ["failed", "failed", "failed", "timed out", "lost"]


@pytest.mark.quick
@pytest.mark.parametrize("number", RECIPES)
def test_a_recipe_needs_torch_alone_and_listens_on_loopback_only(number):
    program = RECIPES[number][2]
    imported = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported <= {"torch"} | set(sys.stdlib_module_names)
    loopback = ('TP_SOCKET_IFNAME="lo"', '"TP_SOCKET_IFNAME", "lo"')
    assert any(each in program for each in loopback)


@pytest.mark.quick
def test_the_list_of_contents_names_every_recipe():
    listed = re.findall(r"^(\d+)\. \[(.+)\]\(#.+\)$", PAGE, re.MULTILINE)
    assert [(int(number), title) for number, title in listed] == [(n, found[0]) for n, found in RECIPES.items()]
    assert list(RECIPES) == list(range(1, PAGE.count("```python") + 1))


@pytest.mark.quick
@pytest.mark.parametrize("page", [ROOT / "docs" / f"{name}.md" for name in ("CONCEPTS", "TROUBLESHOOTING", "RECIPES")])
def test_a_link_to_a_recipe_leads_to_it(page):
    text = page.read_text()
    for number, found in re.findall(r"\[recipe\s+(\d+)\]\((?:RECIPES\.md)?#(\d*)", text):
        assert number == found, page
    for number in re.findall(r"\[recipe\s+(\d+)\]\(RECIPES\.md\)", text):
        assert int(number) in RECIPES, number
