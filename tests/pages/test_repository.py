"""The repository: all copies of the glue are equal, each package works alone, and commands in the pages are valid."""

import contextlib
import io
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from helpers import PACKAGES, PAGES, ROOT, anchor_of, package_on_path
from jobs import JOBS
from programs import run_script


def glue_of(package):
    """Return {path: bytes} of all files in a package's glue/."""
    folder = ROOT / package / "glue"
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_every_copy_of_the_glue_has_the_same_bytes():
    first = glue_of("rl_rpc")
    assert "__init__.py" in first and len(first) > 5
    for package in PACKAGES[1:]:
        copy = glue_of(package)
        assert sorted(copy) == sorted(first), package
        assert [name for name in first if copy[name] != first[name]] == [], package


def run_all(folder, *words, active=".", conda=""):
    """Run a copy of run_all.sh where every python only notes its command line; return (status, these lines).

    `active`, `conda`: the active environments, below `folder`. The first python3 on PATH fails.
    """
    shutil.copy(ROOT / "run_all.sh", folder)  # beside the original there may be a .venv, which is right to use
    log = folder / "log"
    (folder / "bin").mkdir(exist_ok=True)
    for name, status in (("python", 0), ("python3", 1)):
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >>{log}\nexit {status}\n')
        program.chmod(0o755)
    log.write_text("")
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "VIRTUAL_ENV": str(folder / active)}
    env |= {"CONDA_PREFIX": str(folder / conda)} if conda else {}
    done = subprocess.run([folder / "run_all.sh", *words], env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, log.read_text().splitlines()


def test_run_all_runs_every_scenario_that_is_named(tmp_path):
    status, lines = run_all(tmp_path, "rl", "ps")
    ran = [line.split()[1].partition("/")[0] for line in lines if "main.py" in line]
    assert (status, ran) == (0, ["rl_rpc", "param_server"])
    for words in (("rl", "pss"), ("bench", "rl"), ("test", "full", "rl")):  # words that would be ignored
        assert run_all(tmp_path, *words) == (2, [])


def test_run_all_installs_nothing_into_an_environment_that_is_not_active(tmp_path):
    """VIRTUAL_ENV names a folder that does not exist. So run_all.sh wants one of its own; here python3 makes none."""
    status, lines = run_all(tmp_path, "rl", active="gone")
    assert status == 1 and lines and all(line.startswith("python3 ") for line in lines), lines
    status, lines = run_all(tmp_path, "rl", active="gone", conda=".")
    assert status == 0 and any("main.py" in line for line in lines), lines


@pytest.mark.parametrize("rule", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing(rule):
    done = subprocess.run([sys.executable, "-m", "ruff", *rule, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert not any("fmt: skip" in path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize(
    "file, schema",
    [
        (".github/workflows/test.yml", "vendor.github-workflows"),
        (".github/workflows/test.yml", "custom.github-workflows-require-timeout"),
        ("CITATION.cff", "vendor.citation-file-format"),
    ],
)
def test_what_github_reads_fits_its_schema(file, schema):
    pytest.importorskip("check_jsonschema", reason="needs: pip install check-jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(ROOT / file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_job_of_the_workflow_runs_every_folder_of_tests():
    """The tests of a folder that is not named there would never run."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in ROOT.glob("tests/**/test_*.py")}
    assert [set(job["strategy"]["matrix"]["folder"]) for job in jobs.values()] == [folders] * 2
    assert jobs["released"]["strategy"]["matrix"]["python"][0] == "3.10"  # in quotes; the number would be read as 3.1


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.draw(2)
def test_a_package_copied_out_alone_runs_from_anywhere(package, tmp_path):
    alone = tmp_path / "a folder" / package
    shutil.copytree(ROOT / package, alone, ignore=shutil.ignore_patterns("__pycache__"))
    done = run_script(alone / "main.py", *JOBS[package]["size"], *JOBS[package]["short"], cwd="/", cold=True)
    assert (done.returncode, done.stderr) == (0, "")


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


@pytest.mark.parametrize("readme", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_links_in_the_pages_lead_somewhere(readme):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", readme.read_text()):
        if target.startswith("http"):
            continue
        page = readme.parent / target if target else readme
        assert page.exists(), (readme, target)
        assert not anchor or page.suffix != ".md" or anchor in anchors_of(page), (readme, target, anchor)


def differences_of(package):
    """Return (number, text in the column of tests) of each row in the package's page of differences."""
    page = (ROOT / "docs" / "differences" / f"{package}.md").read_text()
    return re.findall(r"^\| (B?\d+) \| .* \| ([^|]*) \|$", page, re.MULTILINE)


def names_of_tests():
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"^ *def (test_\w+)\(", sources, re.MULTILINE))


def test_each_promise_names_tests_that_exist():
    tests = names_of_tests()
    rows = re.findall(r"^\| (?!promise )(.*) \| (.*) \|$", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 20
    for promise, cell in rows:
        named = re.findall(r"`(test_\w+)`", cell)
        assert named and set(named) <= tests, (promise, set(named) - tests)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_numbered_difference_names_tests_that_exist(package):
    tests = names_of_tests()
    rows = differences_of(package)
    assert len(rows) >= 20 and len({number for number, _ in rows}) == len(rows)
    for number, cell in rows:
        named = re.findall(r"`(test_\w+)`", cell)
        assert named and set(named) <= tests, (number, set(named) - tests)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_difference_that_the_code_cites_is_on_the_page(package):
    numbers = {number for number, _ in differences_of(package)}
    for path in (ROOT / package).glob("*.py"):
        cited = re.findall(r"[Dd]ifferences?\s+(B?\d+)", path.read_text())
        assert set(cited) <= numbers, path
