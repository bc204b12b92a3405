"""The repository: all copies of the glue are equal, and ruff finds nothing."""

import subprocess
import sys

import pytest

from helpers import PACKAGES, ROOT

pytestmark = pytest.mark.quick


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


@pytest.mark.parametrize("rule", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing(rule):
    done = subprocess.run([sys.executable, "-m", "ruff", *rule, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
