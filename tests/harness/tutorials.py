"""Run tutorial.py and the other programs that have one file: with one command, or with one command for each rank."""

import contextlib
import pathlib
import re
import shlex
import shutil
import sys
import warnings

from forks import run_in_forks
from jobs import free_port
from listeners import Listeners
from programs import ROOT, run_script
from two_hosts import TwoHosts, why_not


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
    """Run `python path flags`; return the CompletedProcess. `how`: see Program.

    If this machine can make hosts, it runs on one whose name resolves to 127.0.1.1, at which torch would listen by
    default, and everything except torch's stores must listen at 127.0.0.1.
    """
    port = free_port()
    with watched_host(port) as by:
        return without_warnings(run_script(path, "--master_port", port, *flags, timeout=timeout, by=by, **how))


def without_warnings(done):
    """Remove what torch may write at the end of a program: that a connection was closed (docs/TROUBLESHOOTING.md)."""
    done.stderr = re.sub(r"(?m)^\[W.* encountered error when (reading|sending) .*\n", "", done.stderr)
    return done


@contextlib.contextmanager
def watched_host(port):
    """Yield the words that start Python on a host on which everything must listen on loopback, and nothing may poll.

    `port`: of a store of torch, which listens everywhere.
    """
    if why := why_not():
        warnings.warn(f"not checked where it listens, and whether it polls: {why}", stacklevel=2)
        yield [sys.executable]
        return
    with TwoHosts() as hosts, Listeners(hosts, 0) as listeners:
        yield hosts.on(0, [sys.executable])
    of_stores = (port, port + 1)  # ddp_rpc has two
    assert port in {found for _, found in listeners.tcp}
    assert {address for address, found in listeners.tcp if found not in of_stores} == {"127.0.0.1"}
    assert listeners.unix == []  # only torch's polling transport, shm, has such sockets


def run_in_terminals(path, world_size, *flags):
    """Run each rank with a command of its own, the last one first; return their CompletedProcesses, by rank.

    They run in the folder of this copy of a program, and are forks of one process: see forks.py.
    """
    port, path = free_port(), pathlib.Path(path)
    place = [path.name, *flags, "--world_size", world_size, "--master_port", port, "--rank"]
    commands = [shlex.join(map(str, [*place, rank])) for rank in reversed(range(world_size))]
    with watched_host(port) as by:
        ranks = run_in_forks(path.parent, commands, at_once=world_size, seconds=240, by=by)
    return [without_warnings(ranks[command]) for command in reversed(commands)]
