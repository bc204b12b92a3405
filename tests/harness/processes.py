"""What Linux tells of processes: which belong to a program, which are the ranks of a spawned job, and what each is."""

import os
import pathlib
import time


def wait_until(true, seconds, report=lambda: ""):
    """Return what `true()` returns as soon as it is true. Fail after so many seconds, with what `report()` returns."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {seconds} s:\n{report()}"
        time.sleep(0.02)
    return value


def of_process(pid, name):
    """Return the text of a file in /proc/PID, or "" if there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def command_of(pid):
    return of_process(pid, "cmdline").replace("\0", " ")


def environment_of(pid):
    return of_process(pid, "environ").split("\0")


def marked(variable):
    """Return the living processes whose environment has this "NAME=value"."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and variable in environment_of(entry)]


def children_of(pid):
    """Return the children of a process, in the order in which they were started (process ids wrap around)."""
    return [int(child) for child in of_process(pid, f"task/{pid}/children").split()]


def ranks_of(pid, size):
    """Return the process ids of the ranks of a spawned job, in their order, or [] if not all `size` have started.

    They are forks of the starting process: its children that have started no other program.
    """
    ranks = [child for child in children_of(pid) if command_of(child) == command_of(pid)]
    return ranks if len(ranks) >= size else []
