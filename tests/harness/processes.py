"""What Linux tells of processes: which belong to a program, which are the ranks of a spawned job, and what each is."""

import contextlib
import os


def session_members(leader):
    """Return the processes of the session, or of the process group, that this process has started, without zombies."""
    return [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdigit()
        for state, _, group, session, *_ in [status_of(entry)]
        if leader in (int(group), int(session)) and state != "Z"
    ]


def status_of(pid):
    """Return what Linux tells of a process, from its state on; zeros if there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
    return ["0"] * 4


def is_stopped(pid):
    return status_of(pid)[0] == "T"


def children_of(pid):
    """Return the children of a process, in the order in which they were started (process ids wrap around)."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def ranks_of(pid):
    """Return the process ids of a spawned job's ranks that run already, in their order.

    The ranks are children of the fork server, which is a child of the process `pid`, or of warm.py. There they share
    the process group of `pid`.
    """
    own = forked(children_of(pid))
    if own:
        return [rank for server in own for rank in forked(children_of(server))]
    shared = forked(children_of(status_of(pid)[1]))
    return [rank for server in shared for rank in children_of(server) if int(status_of(rank)[2]) == pid]


def forked(pids):
    """Return those of `pids` that are Python's fork server or forks of it.

    Importing torch starts short-lived commands of other names, which are left out.
    """
    return [pid for pid in pids if "multiprocessing.forkserver" in command_of(pid)]


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read().replace("\0", " ")
    except OSError:
        return ""


def environment_of(pid):
    try:
        with open(f"/proc/{pid}/environ", errors="replace") as file:
            return file.read().split("\0")
    except OSError:
        return []
