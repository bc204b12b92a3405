"""The pages: their commands, links and tables agree with the code, and what they show by a command is what it does."""

import ast
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch

from helpers import PACKAGES, PAGES, ROOT, package_on_path, parse_args
from pages import Page
from programs import run_script

of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w/.]+\.py)\)")


@pytest.mark.quick
def test_which_rank_is_what():
    rows = re.findall(r"^\| (\w+) \| (\d) \| ([^\n]+) \|$", Page("docs/RUNNING.md").text, re.MULTILINE)
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
    kinds = ast.FunctionDef | ast.ClassDef
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]
    methods = {f"{node.name}.{each.name}" for node in found for each in node.body if isinstance(each, kinds)}
    return methods | {node.name for node in found}


@pytest.mark.quick
@of_each_page
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
    of_users = {"forty.py", "recipe.py", "hang.py", "late.py", "squares.py"}
    of_torch_and_python = {"api.py", "internal.py", "distributed_c10d.py", "_base.py", "_monitor.py", "queue.py"}
    of_torch_and_python |= {"threading.py", "optimizer.py", "rref_proxy.py", "functions.py"}
    of_others = {"parameter_server.py", "rpc_parameter_server.py"}
    of_earlier_commits = {"servers.py", "stale_learning.py"}
    known = ours | of_users | of_torch_and_python | of_others | of_earlier_commits
    for path in [*PAGES, *code]:
        assert set(re.findall(r"\b\w+\.py\b", path.read_text())) <= known, path


def commands_in(page):
    """Yield (package, script, words) of every command of this repository in the page's code blocks."""
    text = page.read_text().replace("\\\n", " ")
    for path, flags in re.findall(r"(?m)^[ $`]*(?:python|torchrun) (?:.*? )??(\S+\.py)\b(.*)$", text):
        path = pathlib.PurePath(path)
        package = path.parts[0] if len(path.parts) > 1 else page.parent.name
        if package in PACKAGES:
            yield package, path.name, shlex.split(flags.rstrip("`"), comments=True)


@pytest.mark.quick
@of_each_page
def test_the_commands_in_the_pages_parse(page):
    count = 0
    for package, script, words in commands_in(page):
        assert (ROOT / package / script).is_file(), (package, script)
        if script != "main.py" or "cuda" in words:  # this is refused where there is no GPU
            continue
        words = [re.sub(r"^(HOST|10\.0\.0\.1)$", "localhost", word) for word in words]
        assert "--checkpoint" in words or "--resume" not in words, words
        try:
            parse_args(package, *words)
        except SystemExit as ended:  # of --help
            assert ended.code == 0, words
        count += 1
    assert count >= (3 if page.parent.name in PACKAGES or page.name == "RUNNING.md" else 0)


def anchors_of(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "", text)  # of a link, only the label counts
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.quick
@of_each_page
def test_the_links_in_the_pages_lead_somewhere(page):
    text = page.read_text()
    for number, found in re.findall(r"\[recipe\s+(\d+)\]\([\w/.]*#(\d*)", text):
        assert number == found
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if target.startswith("http"):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or linked.suffix != ".md" or anchor in anchors_of(linked), (target, anchor)


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
@of_each_page
def test_a_test_that_is_named_is_there(page):
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^ *def (test_\w+)\(", sources, re.MULTILINE))
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert named <= tests | files, named - tests


# ------------------------------------------------------------------------------------------------------- CONTRIBUTING


def test_the_flag_of_the_worked_diff_works_in_a_package_that_is_alone(tmp_path, capsys):
    folder, saved = tmp_path / "a folder", tmp_path / "saved.pt"
    (words,) = re.findall(r"^ {4}(git apply .*)$", Page("CONTRIBUTING.md").text, re.MULTILINE)
    *command, diff = shlex.split(words)
    package = shutil.copytree(ROOT / "rl_rpc", folder / "rl_rpc", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run([*command, ROOT / diff], cwd=folder, check=True)
    flags = ["--mode", "rollout", "--max_episodes", 2, "--eval_episodes", 1, "--checkpoint", saved]
    done = run_script(package / "main.py", "--hidden", 32, *flags, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.load(saved, weights_only=True)["settings"]["hidden"] == 32  # so another number cannot resume
    with package_on_path(package):
        import play
    play.main([str(saved), "--episodes", "1"])
    assert capsys.readouterr().out.startswith("Episode 1\tReward: ")


# -------------------------------------------------------------------------------- docs/CONCEPTS: a private loopback


def test_the_recipe_for_a_machine_with_other_users():
    (recipe,) = Page("docs/CONCEPTS.md").blocks("bash", "unshare")
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
