"""Run tutorial.py and the other programs that have one file: with one command, or with one command for each rank."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from helpers import ROOT, WarmCommand, read_whole
from jobs import command_of, free_port, session_members


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


def run_spawned(path, *flags, cwd=None, timeout=120, real=False):
    """Run `python path flags` on a free port; return the CompletedProcess. All its processes end with this call.

    Without `real` the command and its ranks are forks of a process that has imported torch already, see warm.py.
    """
    (done,) = _run([[path, "--master_port", free_port(), *flags]], cwd, timeout, real)
    return done


def run_in_terminals(path, world_size, *flags, order=None, cwd=None, timeout=120, real=False):
    """Run each rank with a command of its own; return their CompletedProcesses, by rank.

    `order`: the order in which the ranks are started; without it, the last rank first. `real`: see run_spawned.
    """
    port = free_port()
    order = list(order or reversed(range(world_size)))
    commands = [[path, "--world_size", world_size, "--rank", r, "--master_port", port, *flags] for r in order]
    done = _run(commands, cwd, timeout, real)
    return [done[order.index(rank)] for rank in range(world_size)]


def run_until(text, commands, folder, timeout=60):
    """Run these commands at the same time until one of them prints `text`, then kill them."""
    processes, output = [], folder / "output"
    try:
        with open(output, "w") as file:
            for command in commands:
                environ = os.environ | {"PYTHONUNBUFFERED": "1"}
                started = subprocess.Popen(
                    command, stdout=file, stderr=file, env=environ, cwd=folder, start_new_session=True
                )
                processes.append(started)
        deadline = time.monotonic() + timeout
        while text not in read_whole(output):
            assert time.monotonic() < deadline, read_whole(output)
            assert not any(process.poll() for process in processes), read_whole(output)
            time.sleep(0.02)
    finally:
        _kill(processes)


def _kill(processes):
    """Kill what each of these processes has started, and itself."""
    for process in processes:
        # Python's resource tracker ends by itself, when it has removed the semaphores of the killed processes.
        while killed := [pid for pid in session_members(process.pid) if "resource_tracker" not in command_of(pid)]:
            for pid in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()


def _run(commands, cwd, timeout, real):
    """Run these commands at the same time until all have ended. Each command is a path and its flags."""
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        try:
            for number, (path, *flags) in enumerate(commands):
                command = [sys.executable, str(ROOT / path), *map(str, flags)]  # an absolute path stays as it is
                with open(f"{folder}/{number}.out", "w") as out, open(f"{folder}/{number}.err", "w") as err:
                    if real:
                        started = subprocess.Popen(command, stdout=out, stderr=err, cwd=cwd, start_new_session=True)
                    else:
                        room = f"{folder}/0.out" if len(commands) > 1 else None
                        started = WarmCommand(command, out.name, err.name, cwd, room=room)
                processes.append(started)
            for process in processes:
                process.wait(max(0.01, deadline - time.monotonic()))
        finally:
            _kill(processes)
        return [
            subprocess.CompletedProcess(
                process.args,
                process.returncode,
                read_whole(f"{folder}/{number}.out"),
                read_whole(f"{folder}/{number}.err"),
            )
            for number, process in enumerate(processes)
        ]
