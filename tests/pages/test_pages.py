"""The root README and its pages: programs run as printed, and tables and links agree with the code."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from helpers import PACKAGES, PAGES, ROOT, package_on_path
from jobs import free_port
from programs import run_script

README, CONCEPTS, RUNNING, CONTRIBUTING = (
    (ROOT / f"{name}.md").read_text() for name in ("README", "docs/CONCEPTS", "docs/RUNNING", "CONTRIBUTING")
)
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w/.]+\.py)\)")


# --------------------------------------------------------------------------------------------------------------- README


def masked(output):
    """Replace process ids by P0, P1, ... in the order in which they occur, and thread ids by "main" or "another"."""
    pids = {}

    def mask(found):
        pid, thread = found.groups()
        return f"{pids.setdefault(pid, f'P{len(pids)}')} {'main' if thread == pid else 'another'} thread"

    return re.sub(r"process (\d+), thread (\d+)", mask, output.strip())


def test_the_forty_lines_run_and_print_what_the_page_shows(tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (output,) = re.findall(r"^```text\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    (tmp_path / "forty.py").write_text(program.replace("29500", str(free_port())))
    # Unbuffered, as on a terminal, where lines appear in the order of printing.
    done = run_script(tmp_path / "forty.py", env={"PYTHONUNBUFFERED": "1"})
    assert done.returncode == 0, done.stderr
    assert masked(done.stdout) == masked(output)
    assert masked(output).count("P1 another") == 4 and "P0 main" in masked(output)


def test_which_rank_is_what():
    rows = re.findall(r"^\| (\w+) \| (\d) \| ([^\n]+) \|$", RUNNING, re.MULTILINE)
    assert [row[0] for row in rows] == list(PACKAGES)
    for package, size, cells in rows:
        names = re.findall(r"`(\w+)`", cells)
        with package_on_path(package):
            import main

            args = main.parse_args(["--world_size", size])
            assert names == [main.worker_name(rank, args) for rank in range(int(size))], package


# ------------------------------------------------------------------------------------------------------------ all pages


def names_in(path):
    """Return the names of all functions and classes of a file, and of methods as Class.name."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else ()
            found |= {f"{node.name}.{each.name}" for each in inner if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_to_code_names_what_is_there(page):
    for name, path in LINK.findall(page.read_text()):
        assert name in names_in(page.parent / path), (name, path)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_walk_through_a_step_quotes_lines_of_the_code(package):
    text = (ROOT / package / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| \[([\w.]+)\]\(\2\) \| `([^`]+)` \|", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 6
    for _, name, line in rows:
        lines = [each.split("  #")[0].strip() for each in (ROOT / package / name).read_text().splitlines()]
        assert line in lines, (name, line)


def test_a_file_that_is_named_is_there():
    """This holds for every page, and for the comments and docstrings of the programs."""
    code = [path for folder in (*PACKAGES, "bench", "docs", "tools") for path in (ROOT / folder).glob("**/*.py")]
    ours = {path.name for path in [*code, *(ROOT / "tests").glob("**/*.py")]}
    others = {"forty.py", "recipe.py", "random.py", "late.py", "hang.py", "sitecustomize.py"}  # files of a user
    others |= {"api.py", "internal.py"}  # files of torch, in tracebacks
    others |= {"parameter_server.py", "rpc_parameter_server.py"}  # files of the published code
    for path in [*PAGES, *code]:
        assert set(re.findall(r"\b\w+\.py\b", path.read_text())) <= ours | others, path


# ------------------------------------------------------------------------------------------------------- CONTRIBUTING


def apply_worked_diff(folder):
    """Copy rl_rpc and apply docs/contributing/add_a_flag.diff as the page does; return the path of its main.py."""
    (words,) = re.findall(r"^ {4}(git apply .*)$", CONTRIBUTING, re.MULTILINE)
    *command, diff = shlex.split(words)
    shutil.copytree(ROOT / "rl_rpc", folder / "rl_rpc", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q", folder], check=True)
    done = subprocess.run([*command, ROOT / diff], text=True, cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr
    return folder / "rl_rpc" / "main.py"


def test_the_worked_diff_applies(tmp_path):
    assert '"--hidden"' in apply_worked_diff(tmp_path).read_text()


@pytest.mark.slow
def test_the_flag_of_the_worked_diff_works(tmp_path):
    main, saved = apply_worked_diff(tmp_path), tmp_path / "saved.pt"
    flags = ["--mode", "rollout", "--max_episodes", 2, "--eval_episodes", 1, "--checkpoint", saved]
    done = run_script(main, "--hidden", 32, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    done = run_script(main, "--hidden", 16, *flags, "--resume")
    assert done.returncode == 1 and "was made with --hidden 32, and this run has 16" in done.stderr
    done = run_script(main, "--hidden", 0)
    assert done.returncode == 2 and "--hidden" in done.stderr
    done = run_script(main.with_name("play.py"), saved, "--episodes", 1)
    assert (done.returncode, done.stderr) == (0, "")


# -------------------------------------------------------------------------------- docs/CONCEPTS: a private loopback


@pytest.mark.slow
def test_the_recipe_for_a_machine_with_other_users():
    (recipe,) = re.findall(r"^```bash\n(unshare .*)\n```", CONCEPTS, re.MULTILINE)
    can = subprocess.run(["unshare", "--map-root-user", "--net", "ip", "link", "set", "lo", "up"], capture_output=True)
    if can.returncode:
        pytest.skip(f"no network namespace can be made here: {can.stderr.decode()}")
    shown = "readlink /proc/self/ns/net && ip -brief address && exec"
    recipe = recipe.replace("exec", shown).replace("rollout'", "rollout --max_episodes 3 --eval_episodes 1'")
    environ = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    done = subprocess.run(recipe, shell=True, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    namespace, *lines = done.stdout.splitlines()
    assert namespace != os.readlink("/proc/self/ns/net")
    interfaces = [line.split()[0] for line in lines if re.search(r"\d/\d", line)]
    assert interfaces == ["lo"], "the namespace has other interfaces than loopback"
    assert "Greedy policy over 1 episodes" in done.stdout
