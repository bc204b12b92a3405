"""Copy rl_rpc/glue, which is the copy to edit, to the other three packages: python tools/sync_glue.py

A package gets the files that its modules import, and what these import.
"""

import ast
import pathlib
import shutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
GLUE = ROOT / "rl_rpc" / "glue"


def imported_by(path):
    """Return the names of the files of the glue that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "glue":
            names |= {f"{alias.name}.py" for alias in node.names if (GLUE / f"{alias.name}.py").exists()}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("glue."):
            names.add(f"{node.module.partition('.')[2]}.py")
    return names


def needed_by(package):
    """Return the names of the files of the glue that a package needs."""
    needed = {"__init__.py"}
    todo = set().union(*(imported_by(path) for path in (ROOT / package).glob("*.py")))
    while todo:
        needed |= todo
        todo = set().union(*(imported_by(GLUE / name) for name in todo)) - needed
    return needed


if __name__ == "__main__":
    for package in ("rnn_rpc", "ddp_rpc", "param_server"):
        copy = ROOT / package / "glue"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name in needed_by(package):
            shutil.copy(GLUE / name, copy)
