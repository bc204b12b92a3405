"""The repository: all copies of the glue are equal, and ruff finds nothing."""

import subprocess
import sys

import pytest

from helpers import PACKAGES, ROOT, load_module

pytestmark = pytest.mark.quick


def glue_of(package):
    """Return {path: bytes} of all files in a package's glue/."""
    folder = ROOT / package / "glue"
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_each_package_has_the_files_of_the_glue_that_it_imports_with_the_same_bytes():
    first = glue_of("rl_rpc")
    needed_by = load_module(ROOT / "tools" / "sync_glue.py").needed_by
    for package in PACKAGES:
        copy = glue_of(package)
        assert copy.keys() == needed_by(package) and len(copy) > 10, package
        assert [name for name in copy if copy[name] != first[name]] == [], package


@pytest.mark.parametrize("rule", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing(rule):
    done = subprocess.run([sys.executable, "-m", "ruff", *rule, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
