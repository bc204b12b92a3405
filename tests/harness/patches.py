"""Programs of this repository that a function of a test has changed: they fail, are slow, or tell more.

    def fails(step, os):
        step.Observer.reset = lambda self, episode: os._exit(3)

    run_script(main_with("rl_rpc", tmp_path, fails), "--world_size", 3)

The arguments of such a function are modules of these names: of the package, or of a library. `program` is the program
itself. Only its own lines go into the copy of the program, so it uses nothing else.
"""

import inspect
import pathlib
import textwrap

from programs import ROOT

GUARD = 'if __name__ == "__main__":'
# The ranks of a program in one file are forks then. They need not import torch again, which takes each of them seconds.
FORKS = """
import functools, importlib, sys, torch.multiprocessing
torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
"""


def patched(path, patch, **values):
    """Let a copied program call `patch` before it begins, in every rank; return its path.

    `values`: for those arguments of `patch` that are no modules.
    """
    path = pathlib.Path(path)
    before, guard, after = path.read_text().partition(GUARD)
    assert guard, path
    arguments = {name: repr(value) for name, value in values.items()}
    for name in inspect.signature(patch).parameters:
        module = "sys.modules[__name__]" if name == "program" else f"importlib.import_module({name!r})"
        arguments.setdefault(name, module)
    call = f"{patch.__name__}({', '.join(f'{name}={value}' for name, value in arguments.items())})"
    source = textwrap.dedent(inspect.getsource(patch))
    path.write_text(f"{before}{FORKS}\n{source}\n\n{call}\n\n{guard}{after}")
    return path


def main_with(package, folder, patch, **values):
    """Return the path of a copy of a package's main.py, in `folder`, that calls `patch`: see patched."""
    copy = folder / package
    copy.mkdir()
    for each in (ROOT / package).iterdir():
        if each.name != "main.py":
            (copy / each.name).symlink_to(each)
    (copy / "main.py").write_text((ROOT / package / "main.py").read_text())
    return patched(copy / "main.py", patch, **values)
