"""The pages: their commands, links and tables agree with the code, and what they show by a command is what it does."""

import ast
import contextlib
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch

from helpers import PACKAGES, PAGES, ROOT, anchor_of, package_on_path
from pages import Page
from programs import run_script

CONCEPTS, RUNNING, CONTRIBUTING = (
    (ROOT / f"{name}.md").read_text() for name in ("docs/CONCEPTS", "docs/RUNNING", "CONTRIBUTING")
)
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w/.]+\.py)\)")


@pytest.mark.quick
def test_which_rank_is_what():
    rows = re.findall(r"^\| (\w+) \| (\d) \| ([^\n]+) \|$", RUNNING, re.MULTILINE)
    assert [row[0] for row in rows] == list(PACKAGES)
    for package, size, cells in rows:
        names = re.findall(r"`(\w+)`", cells)
        with package_on_path(package):
            import main

            args = main.parse_args(["--world_size", size])
            assert names == main.scenario(args).workers, package


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


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_link_to_code_names_what_is_there(page):
    for name, path in LINK.findall(page.read_text()):
        assert name in names_in(page.parent / path), (name, path)


@pytest.mark.quick
@pytest.mark.parametrize("package", PACKAGES)
def test_a_walk_through_a_step_quotes_lines_of_the_code(package):
    text = (ROOT / package / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| \[([\w.]+)\]\(\2\) \| `([^`]+)` \|", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 6
    for _, name, line in rows:
        lines = [each.split("  #")[0].strip() for each in (ROOT / package / name).read_text().splitlines()]
        assert line in lines, (name, line)


@pytest.mark.quick
def test_a_file_that_is_named_is_there():
    """This holds for every page, and for the comments and docstrings of the programs."""
    code = [path for folder in (*PACKAGES, "bench", "docs", "tools") for path in (ROOT / folder).glob("**/*.py")]
    ours = {path.name for path in [*code, *(ROOT / "tests").glob("**/*.py")]}
    ours |= {name for page in PAGES for name in Page(page).programs}
    of_users = {"forty.py", "recipe.py", "hang.py", "random.py", "late.py", "squares.py"}
    of_torch_and_python = {"api.py", "internal.py", "distributed_c10d.py", "_base.py", "_monitor.py", "queue.py"}
    of_torch_and_python |= {"threading.py", "optimizer.py"}
    of_others = {"parameter_server.py", "rpc_parameter_server.py"}
    of_earlier_commits = {"migrating.py", "published_batch.py", "servers.py", "stale_learning.py"}
    known = ours | of_users | of_torch_and_python | of_others | of_earlier_commits
    for path in [*PAGES, *code]:
        assert set(re.findall(r"\b\w+\.py\b", path.read_text())) <= known, path


def commands_in(readme):
    """Yield (package, script, words) of every command of this repository in the page's code blocks."""
    text = readme.read_text().replace("\\\n", " ")
    for line in text.splitlines():
        line = line.strip().strip("`").removeprefix("$ ")
        if not line.startswith(("python ", "torchrun ")):
            continue
        words = shlex.split(line, comments=True)
        for number, word in enumerate(words):
            if word.endswith(".py") and words[0] in ("python", "torchrun"):
                path = pathlib.PurePath(word)
                package = path.parts[0] if len(path.parts) > 1 else readme.parent.name
                if package in PACKAGES:
                    yield package, path.name, words[number + 1 :]
                break


@pytest.mark.quick
@pytest.mark.parametrize("readme", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_in_the_pages_parse(readme):
    count = 0
    for package, script, words in commands_in(readme):
        assert (ROOT / package / script).is_file(), (package, script)
        if script != "main.py":
            continue
        words = [re.sub(r"^(HOST|10\.0\.0\.1)$", "localhost", word) for word in words]
        if "cuda" in words:
            continue  # refused where there is no GPU
        if "--resume" in words and "--checkpoint" not in words:
            raise AssertionError((readme, words))
        stderr = io.StringIO()
        with package_on_path(package), contextlib.redirect_stderr(stderr):
            import main

            try:
                main.parse_args(words)
            except SystemExit as ended:
                assert ended.code == 0, (words, stderr.getvalue())
        count += 1
    assert count >= (3 if readme.parent.name in PACKAGES or readme.name == "RUNNING.md" else 0), readme


def anchors_of(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.quick
@pytest.mark.parametrize("readme", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_links_in_the_pages_lead_somewhere(readme):
    text = readme.read_text()
    for number, found in re.findall(r"\[recipe\s+(\d+)\]\([\w/.]*#(\d*)", text):
        assert number == found, readme
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if target.startswith("http"):
            continue
        page = readme.parent / target if target else readme
        assert page.exists(), (readme, target)
        assert not anchor or page.suffix != ".md" or anchor in anchors_of(page), (readme, target, anchor)


@pytest.mark.quick
@pytest.mark.parametrize("package", PACKAGES)
def test_a_difference_that_the_code_cites_is_on_the_page(package):
    page = (ROOT / "docs" / "differences" / f"{package}.md").read_text()
    numbers = re.findall(r"^\| (B?\d+) \| ", page, re.MULTILINE)
    assert len(numbers) == len(set(numbers)) >= 20
    for path in (ROOT / package).glob("*.py"):
        cited = re.findall(r"[Dd]ifferences?\s+(B?\d+)", path.read_text())
        assert set(cited) <= set(numbers), path


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_test_that_is_named_is_there(page):
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^ *def (test_\w+)\(", sources, re.MULTILINE))
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert named <= tests | files, named - tests


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


@pytest.mark.quick
def test_the_worked_diff_applies(tmp_path):
    assert '"--hidden"' in apply_worked_diff(tmp_path).read_text()


def test_the_flag_of_the_worked_diff_works_in_a_package_that_is_alone(tmp_path, capsys):
    main, saved = apply_worked_diff(tmp_path / "a folder"), tmp_path / "saved.pt"
    flags = ["--mode", "rollout", "--max_episodes", 2, "--eval_episodes", 1, "--checkpoint", saved]
    done = run_script(main, "--hidden", 32, *flags, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.load(saved, weights_only=True)["settings"]["hidden"] == 32  # so another number cannot resume
    with package_on_path(main.parent):
        import play
    play.main([str(saved), "--episodes", "1"])
    assert capsys.readouterr().out.startswith("Episode 1\tReward: ")


# -------------------------------------------------------------------------------- docs/CONCEPTS: a private loopback


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
