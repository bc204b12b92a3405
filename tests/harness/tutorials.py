"""Run tutorial.py and the other programs that have one file: with one command, or with one command for each rank."""

import contextlib
import shutil
import time

from jobs import free_port
from programs import ROOT, Program, run_script


def copied_alone(path, folder):
    """Copy one program (its path is relative to the repository) into an empty folder; return the copy's path."""
    alone = folder / "an empty folder"
    alone.mkdir(exist_ok=True)
    return shutil.copy(ROOT / path, alone)


def changed(path, *changes):
    """Replace texts in a copied program; return its path."""
    with open(path) as file:
        text = file.read()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    with open(path, "w") as file:
        file.write(text)
    return path


def run_spawned(path, *flags, timeout=120, **how):
    """Run `python path flags` on a free port; return the CompletedProcess. `how`: see Program."""
    return run_script(path, "--master_port", free_port(), *flags, timeout=timeout, **how)


def run_in_terminals(path, world_size, *flags, order=None, timeout=120, **how):
    """Run each rank with a command of its own; return their CompletedProcesses, by rank. `how`: see Program.

    `order`: the order in which the ranks are started; without it, the last rank first.
    """
    place = ["--world_size", world_size, "--master_port", free_port(), *flags, "--rank"]
    with contextlib.ExitStack() as stack:
        ranks = {}
        for rank in order or reversed(range(world_size)):
            ranks[rank] = stack.enter_context(Program(path, *place, rank, **how))
        deadline = time.monotonic() + timeout
        for program in ranks.values():
            program.wait(max(0.01, deadline - time.monotonic()))
        return [ranks[rank].result() for rank in range(world_size)]
