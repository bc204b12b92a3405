"""Run tutorial.py and the other programs that have one file: with one command, or with one command for each rank."""

import pathlib
import re
import shlex
import shutil

from forks import run_in_forks
from jobs import free_port
from programs import ROOT, run_script
from two_hosts import watched_host


def copied_alone(path, folder):
    """Copy one program (its path is relative to the repository) into an empty folder; return the copy's path."""
    alone = folder / "an empty folder"
    alone.mkdir(exist_ok=True)
    return shutil.copy(ROOT / path, alone)


def run_spawned(path, *flags, timeout=120, **how):
    """Run `python path flags` on a watched host; return the CompletedProcess. `how`: see Program."""
    port = free_port()
    with watched_host(port, port + 1) as by:  # ddp_rpc has two stores
        return without_warnings(run_script(path, "--master_port", port, *flags, timeout=timeout, by=by, **how))


def without_warnings(done):
    """Remove what torch may write at the end of a program: that a connection was closed (docs/TROUBLESHOOTING.md)."""
    done.stderr = re.sub(r"(?m)^\[W.* encountered error when (reading|sending) .*\n", "", done.stderr)
    return done


def run_in_terminals(path, world_size, *flags):
    """Run each rank with a command of its own, the last one first; return their CompletedProcesses, by rank.

    They run in the folder of this copy of a program, and are forks of one process: see forks.py.
    """
    port, path = free_port(), pathlib.Path(path)
    place = [path.name, *flags, "--world_size", world_size, "--master_port", port, "--rank"]
    commands = [shlex.join(map(str, [*place, rank])) for rank in reversed(range(world_size))]
    with watched_host(port, port + 1) as by:
        ranks = run_in_forks(path.parent, commands, at_once=world_size, seconds=240, by=by)
    return [without_warnings(ranks[command]) for command in reversed(commands)]
