"""Finds the processes of a program that runs, and takes a dump of each, by py-spy.

A process stands still for some milliseconds while its stacks are read. Only what has not moved since before the dump
counts as waiting: the kernel counts how often each thread has begun to wait.
"""

import contextlib
import ipaddress
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time
from typing import NamedTuple

WATCHED = 1.0  # seconds for which a thread must not move
LIMIT = 30.0  # seconds for a dump
OPEN, LISTENS = "01", "0A"  # states of a socket, in /proc
UNREADABLE = "tells no stacks"  # of a process that starts, for example
STOPPED = "it is stopped, by SIGSTOP or a debugger"
FORBIDDEN = (
    "py-spy may not look into process {}: run this as root (sudo), in a container with --cap-add SYS_PTRACE, or after "
    "`sysctl kernel.yama.ptrace_scope=0`"
)


class NoDump(Exception):
    """Why there is no dump, in one line."""


class Task(NamedTuple):
    name: str  # of a thread, in the kernel
    state: str  # a letter, see proc(5)
    waits: int  # how often it has begun to wait


def chosen(pids):
    """Return which processes a user means: these; or all that belong to a single one; or all with torch."""
    for pid in pids:
        check_rights(pid)
    if len(pids) > 1:
        return sorted(set(pids))
    found = related(pids[0]) if pids else [pid for pid in all_processes() if has_torch(pid)]
    if not found:
        which = ": neither this one, nor one that it has started or talks to" if pids else ""
        raise NoDump(f"no process with torch was found{which}")
    return found


def take(pids):
    """Return a dump of each process. It can be written into a file, and read on another machine."""
    command = shutil.which("py-spy") or os.path.join(os.path.dirname(sys.executable), "py-spy")
    if not os.path.exists(command):
        raise NoDump("py-spy is not there: pip install py-spy")
    moment, began, before = time.time(), time.monotonic(), {pid: threads_of(pid) for pid in pids}
    running = {}
    for pid in pids:
        if not any(task.state in "Tt" for task in before[pid].values()):  # py-spy would wait for one that is stopped
            words = [command, "dump", "--json", "-ll", "--pid", str(pid)]
            running[pid] = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    outputs = {pid: output_of(process) for pid, process in running.items()}
    time.sleep(max(0.0, began + WATCHED - time.monotonic()))
    return [dump_of(pid, moment, before[pid], threads_of(pid), *outputs.get(pid, ("", STOPPED))) for pid in pids]


def output_of(process):
    try:
        return process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "", f"none within {LIMIT:.0f} s"


def dump_of(pid, moment, before, after, text, error):
    """Return what a file of --dump contains of a process. stacks.look() adds `sources` and `joined`."""
    # To take the dump wakes each thread, always as often, and this counts. Who moved least is taken to have stood: a
    # process with torch always has threads that do, for example those that handle its messages.
    both = [tid for tid in after if tid in before and before[tid].state + after[tid].state in ("SS", "DD")]
    moves = {tid: after[tid].waits - before[tid].waits for tid in both}
    by_dump = min(moves.values(), default=0)
    dump = {
        "host": socket.gethostname(),
        "pid": pid,
        "started": started(pid),
        "moment": moment,  # the same for all processes of which the dumps were taken together
        "torch": re.findall(r" (/.*/torch/)lib/libtorch_cpu\.so$", read(pid, "maps"), re.MULTILINE)[:1],  # its folder
        "stacks": [],  # of py-spy
        "comms": [[tid, task.name] for tid, task in after.items()],  # what the kernel calls each thread
        "still": [tid for tid in both if moves[tid] == by_dump],  # those that have not moved
        "caught": caught(pid),
        "cwd": read(pid, "cwd"),
        "argv": read(pid, "cmdline").split("\0"),
        "environ": environ(pid),
        "sources": {},  # path of a file of the program -> its source
        "joined": {},  # how it has joined the others, if a recording or the store tells: "worker", "rank" and so on
        "error": "",  # instead of stacks
    }
    with contextlib.suppress(ValueError):
        return dump | {"stacks": json.loads(text)}
    if not after:
        return dump | {"error": "has ended"}
    if re.search("ermission|ptrace|not permitted", error):
        raise NoDump(FORBIDDEN.format(pid))
    reason = error.partition("\n\n")[0].strip()[:200]  # what follows is a traceback of py-spy
    return dump | {"error": STOPPED if error == STOPPED else f"{UNREADABLE}: {reason}"}


def threads_of(pid):
    """Return {number of a thread: Task}."""
    found = {}
    with contextlib.suppress(OSError):
        for tid in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, KeyError):
                lines = pathlib.Path(f"/proc/{pid}/task/{tid}/status").read_text().splitlines()
                known = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                if known["State"][0] not in "ZX":  # it has ended
                    found[int(tid)] = Task(known["Name"], known["State"][0], int(known["voluntary_ctxt_switches"]))
    return found


def caught(pid):
    """Return the numbers of the signals for which a process has a function of its own."""
    mask = int(read(pid, "status").partition("SigCgt:\t")[2][:16] or "0", 16)
    return [number for number in range(1, 65) if mask & 1 << (number - 1)]


# ------------------------------------------------------------------------------------------------------------ processes


def read(pid, name):
    """Return what a file of a process in /proc contains, or to which path it leads; "" if it cannot be read."""
    path = f"/proc/{pid}/{name}"
    with contextlib.suppress(OSError):
        return os.readlink(path) if os.path.islink(path) else pathlib.Path(path).read_text(errors="replace")
    return ""


def environ(pid):
    """Return the environment with which a process was started."""
    return dict(word.partition("=")[::2] for word in read(pid, "environ").split("\0"))


def started(pid):
    """Return when a process has started, in seconds since 1970; 0 if that is not known."""
    words = read(pid, "stat").rpartition(")")[2].split()
    if not words:
        return 0.0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(words[19]) / os.sysconf("SC_CLK_TCK")


def has_torch(pid):
    """Return whether a process is there that has torch loaded, as far as this user may see it."""
    return "/libtorch_cpu.so" in read(pid, "maps")


def check_rights(pid):
    try:
        open(f"/proc/{pid}/maps").close()
    except PermissionError:
        raise NoDump(FORBIDDEN.format(pid)) from None
    except OSError:
        raise NoDump(f"process {pid}: there is none") from None


def all_processes():
    names = os.listdir("/proc") if os.path.isdir("/proc") else []  # macOS has none
    return [int(name) for name in names if name.isdigit()]


def children(pid):
    """Return the processes that a process has started."""
    return [int(child) for task in threads_of(pid) for child in read(pid, f"task/{task}/children").split()]


def related(pid):
    """Return the processes with torch that a process has started, or that talk to these over TCP on this machine."""
    everybody = [one for one in all_processes() if one == pid or has_torch(one)]
    ports = {one: ends_of(one, OPEN) for one in everybody}
    found = [pid]
    for one in found:  # which grows
        found += [child for child in children(one) if child not in found]
        ends = {(there, here) for here, there in ports.get(one, ())}
        found += [other for other in everybody if other not in found and ends.intersection(ports[other])]
    return sorted(one for one in found if has_torch(one))


def listens_on(pid):
    """Return each (address, port) on which a process listens."""
    return {here for here, _ in ends_of(pid, LISTENS)}


def ends_of(pid, state):
    """Return {(end here, end there)} of the TCP sockets of a process that are in this state."""
    sockets = set()
    with contextlib.suppress(OSError):
        sockets = {read(pid, f"fd/{name}")[len("socket:[") : -1] for name in os.listdir(f"/proc/{pid}/fd")}
    lines = [line.split() for table in ("tcp", "tcp6") for line in read(pid, f"net/{table}").splitlines()[1:]]
    return {(plain(words[1]), plain(words[2])) for words in lines if words[9] in sockets and words[3] == state}


def plain(end):
    """Return the (address, port) of an end. An address of IPv4 may be written as one of IPv6."""
    digits, _, port = end.partition(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)
