"""The programs in one file: what they import, and what RPC adds to them."""

import ast
import re
import sys

import pytest

from helpers import PACKAGES, ROOT

LIBRARIES = {"torch", "torchvision", "gymnasium", "numpy", "matplotlib"}
NAMES = ("tutorial.py", "tutorial_batch.py", "single.py")
PROGRAMS = [path for name in NAMES for path in sorted(ROOT.glob(f"*/{name}")) if path.parent.name in PACKAGES]


def test_every_package_has_its_tutorial_and_the_same_without_rpc():
    found = {f"{path.parent.name}/{path.name}" for path in PROGRAMS}
    wanted = {f"{package}/{name}" for package in PACKAGES for name in ("tutorial.py", "single.py")}
    assert found == wanted | {"rl_rpc/tutorial_batch.py", "param_server/tutorial_batch.py"}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_program_in_one_file_needs_nothing_but_libraries(path):
    text = path.read_text()
    assert [line for line in text.splitlines() if len(line) > 100] == []
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module.partition(".")[0])
    assert imported <= LIBRARIES | set(sys.stdlib_module_names)
    if path.name == "single.py":
        # Only the docstring may contain the word.
        assert "rpc" not in text.partition('"""')[2].partition('"""')[2]
    else:
        assert all(call in text for call in ("mp.spawn(", "rpc.init_rpc(", "rpc.shutdown("))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_lines_that_rpc_adds_are_those_of_the_programs(package):
    """Compare the output of `diff single.py tutorial.py` in the README with the two programs."""
    folder = ROOT / package
    (block,) = re.findall(r"^```diff\n(.*?)^```", (folder / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    single, tutorial = ((folder / name).read_text().splitlines() for name in ("single.py", "tutorial.py"))
    lines = [line for line in block.splitlines() if line and line != "@@"]
    assert len(lines) > 10
    for line in lines:
        assert line[0] in " +-"
        assert line[0] == "+" or line[1:] in single, line
        assert line[0] == "-" or line[1:] in tutorial, line
