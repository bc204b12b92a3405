"""What Linux tells of processes: which belong to a program, which are the ranks of a spawned job, and what each is."""

import contextlib
import os


def marked(variable):
    """Return the living processes whose environment has this "NAME=value"."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and variable in environment_of(entry)]


def children_of(pid):
    """Return the children of a process, in the order in which they were started (process ids wrap around)."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def forks_of(pid):
    """Return the children of a process that are forks of it, which have started no other program."""
    return [child for child in children_of(pid) if command_of(child) == command_of(pid)]


def ranks_of(pid, size):
    """Return the process ids of the ranks of a spawned job, in their order, or [] if not all `size` have started."""
    ranks = forks_of(pid)
    return ranks if len(ranks) >= size else []


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().replace("\0", " ")
    except OSError:
        return ""


def listens(pid):
    """Return whether a process has a TCP socket that listens, also in another network namespace."""
    with open(f"/proc/{pid}/net/tcp") as table:
        listening = {f"socket:[{fields[9]}]" for fields in map(str.split, table) if fields[3] == "0A"}
    own = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
            own.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return not own.isdisjoint(listening)


def environment_of(pid):
    try:
        with open(f"/proc/{pid}/environ", errors="replace") as file:
            return file.read().split("\0")
    except OSError:
        return []
