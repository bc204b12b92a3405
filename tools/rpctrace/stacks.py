"""From the numbers of processes to evidence, in two steps.

look() and look_into() take the dumps (dumps.py), and add what can only be read while the processes run: the sources,
and the names that a recording or the store tells (names.py). The result is a list of dumps, which `why --dump` writes
into a file. dumps.dump_of() lists their keys.

processes_of() makes a list of evidence.Process of it, here or on another machine. threads.py does this for one stack.
"""

import ast
import collections
import contextlib
import itertools
import os
import re
import signal
import socket
import tokenize

from rpctrace import dumps, names, read, syntax, waits
from rpctrace.evidence import Process, Wait
from rpctrace.threads import OPTIMIZER, frame_of, number_threads, place_of, thread_of

GROUP = "init_process_group"
# Names of threads of torch: RPC threads; two of each process group; those that run when a message has come; and those
# that look for messages all the time, and are never still.
POOL, GLOO, NETWORK = "pt_thread_pool", "pt_gloo_runloop", ("TP_UV_loop", "TP_CMA_loop", "pt_gloo")
POLLS = {"TP_SHM_reactor", "gloo_tcp_loop"}
# A thread may be woken by something that is on no stack while we look: a callback of a Future, or the handler of a
# signal. A process that may have either is `unseen`. USUAL are the signals that Python, faulthandler and the C library
# always catch, and PRINTS finds those that the program gives to faulthandler. None of these wakes anybody.
CALLBACKS = re.compile(r"\.then\(|\.add_done_callback\(")
USUAL = {signal.SIGINT, signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, 32, 33}
PRINTS = re.compile(r"faulthandler\.register\(signal\.(SIG\w+)")
INSTALLED = re.compile(rf"/(site|dist)-packages/|{OPTIMIZER}")
MOST_FILES = 200  # whose source is read, of one process
TOLD = ("worker", "rank", "world", "limit")  # what a recording tells of a process that has joined


def look(pids, address="", recorded=()):
    """Return what is seen of processes: their dumps, with the source, and with the names of the workers.

    `address`: HOST:PORT of the store that they use. `recorded`: what a recording tells of each, see read.py.
    """
    seen = dumps.take(pids)
    told = {process["pid"]: {key: process[key] for key in TOLD} for process in recorded if "worker" in process}
    for dump in seen:
        add_sources(dump)
        dump["joined"] = told.get(dump["pid"], {})
    workers = names.by_store(address) if address else workers_by_environ(seen)
    if workers:
        for dump in seen:
            for end in dumps.listens_on(dump["pid"]) & workers.keys():
                dump["joined"] |= workers[end]
    return seen


def workers_by_environ(seen):
    """Return what names.by_store() does, of the store in the environment, if the sources and a recording leave workers
    without a name.
    """
    unnamed = [process.pid for process in processes_of(seen) if process.rpc and not process.named]
    if address := names.store_of(unnamed):
        with contextlib.suppress(dumps.NoDump):  # it may be that of something else
            return names.by_store(address)
    return {}


def look_into(folder, address="", also=()):
    """Return what is seen of the processes of this machine that record into a folder: of all that live, and of those
    that have ended without leaving RPC.

    `also`: numbers of processes that may not have recorded anything yet.
    """
    recorded = {one["pid"]: one for one in read.read(folder, most=0) if one.get("host") == socket.gethostname()}
    living = {pid for pid in (*recorded, *also) if dumps.has_torch(pid)}
    if not living:
        raise dumps.NoDump(f"no process that records into {folder} runs on this machine")
    there = {"", *(recorded[pid].get("worker", "") for pid in living & recorded.keys())}
    # Unless a living process has taken their name.
    gone = {pid for pid, one in recorded.items() if one.get("worker", "") not in there and not one.get("left")}
    return look(sorted(living | gone), address, recorded.values())


def add_sources(dump):
    """Add the sources of the program's files on the stacks, and of those beside them that they import.

    Keep only the environment that they name.
    """
    places = {place_of(dump, frame) for stack in dump["stacks"] for frame in stack["frames"]}
    files = [(path, library) for path, library in places if not path.startswith("<")]  # <string>, of a spawned process
    paths = [path for path, library in files if not library or path.endswith(OPTIMIZER)]
    folders = {os.path.dirname(path) for path in paths if not INSTALLED.search(path)}
    # By its own root, because a process in a container has other files under the same names.
    root = f"/proc/{dump['pid']}/root"
    for path in paths:  # which grows
        if path not in dump["sources"] and len(dump["sources"]) < MOST_FILES:
            dump["sources"][path] = source_of(root + path, dump["started"])
            if not INSTALLED.search(path):  # while a large package is imported, all of it would be read
                modules = [os.path.join(*one) for one in itertools.product(folders, modules_of(dump["sources"][path]))]
                paths += [module for module in modules if os.path.exists(root + module)]
    words = set(re.findall(r"\w+", " ".join(dump["sources"].values())))
    dump["environ"] = {name: value for name, value in dump["environ"].items() if name in words}  # it may hold secrets


def modules_of(source):
    """Return the paths that the modules which a source imports would have within a folder."""
    found = []
    for node in ast.walk(syntax.parsed(source)):
        imported = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        base = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        # `from package import name`: the name may be a module.
        found += [name for one in imported for name in (*base, ".".join([*base, one]))]
    places = [name.replace(".", "/") for name in dict.fromkeys(found)]
    return [path for place in places for path in (f"{place}.py", f"{place}/__init__.py")]


def source_of(path, started):
    """Return the source of a file, or "" if it cannot be read, or has been changed since a process has started."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # it is not there, or is no text of Python
        if os.stat(path).st_ctime < started + 1:  # the kernel's clock is coarse
            with tokenize.open(path) as file:
                return file.read() or "\n"
    return ""


# --------------------------------------------------------------------------------------------- from dumps to evidence


def processes_of(seen):
    """Return the processes that look() has seen, in the order of their ranks."""
    processes = [process_of(dump) for dump in seen]
    counts = collections.Counter((process.name, process.rpc) for process in processes)
    for process in processes:
        # Two that seem to have the same name have none. But the parent of a worker, for example, has not joined.
        taken = counts[process.name, process.rpc] > 1 or (not process.rpc and counts[process.name, True])
        if taken or not process.name:
            process.name, process.named = f"process {process.pid} on {process.host}", False
            process.rank, process.world = -1, 0
    return sorted(processes, key=lambda process: (process.rank if process.rank >= 0 else 1 << 30, process.pid))


def process_of(dump):
    """Return the Process of a dump."""
    stacks = {}  # number of a thread in the kernel -> its frames
    for stack in dump["stacks"]:
        stacks[stack["os_thread_id"]] = [frame_of(dump, frame) for frame in stack["frames"]]
    number_threads(stacks)  # so that Thread.join shows for which thread it waits
    main, comms = stacks.get(dump["pid"], []), dict(dump["comms"])
    joined, pool = joined_of(dump, main), {tid for tid, comm in comms.items() if comm == POOL}
    # Threads of C++ that have run while we looked, by their names in the kernel. They may bring a message.
    moved = {comm for tid, comm in comms.items() if tid not in {*dump["still"], *stacks}}
    return Process(
        name=joined["worker"],
        host=dump["host"],
        pid=dump["pid"],
        rank=joined["rank"],
        world=joined["world"] or 0,
        rpc=bool(pool or dump["error"] or any(map(joins, main))),  # of one without stacks it is not known
        groups=list(comms.values()).count(GLOO) // 2,
        lost=dump["error"],
        ended=not comms,
        moment=dump["moment"],
        threads=threads_of(dump, stacks, joined["limit"]),
        pool=len(pool),
        free=len(pool - stacks.keys()),  # an RPC thread that runs Python has a stack
        **without_stacks(dump, moved),  # quiet, unseen, still
    )


def without_stacks(dump, moved):
    """Return what is known of threads without a stack, which may wake others: evidence's `quiet`, `unseen`, `still`.

    `moved`: the names of the threads without a stack that have moved.
    """
    text = "\n".join(dump["sources"].values())
    harmless = USUAL.union(getattr(signal, name, 0) for name in PRINTS.findall(text))
    return {
        "quiet": not any(comm.startswith(NETWORK) for comm in moved),
        "unseen": bool(
            CALLBACKS.search(text) or not all(dump["sources"].values()) or not harmless.issuperset(dump["caught"])
        ),
        "still": moved <= POLLS,
    }


def threads_of(dump, stacks, limit):
    """Return {number: Thread} of a process. `limit`: that of calls which have none of their own."""
    found, limited = {}, may_have_limits(dump)
    for stack in dump["stacks"]:
        tid, frames = stack["os_thread_id"], stacks[stack["os_thread_id"]]
        if not any(frame.path.endswith(waits.NOBODY) for frame in frames):
            thread = found[tid] = thread_of(stack, frames, tid in dump["still"], limit)
            thread.main = tid == dump["pid"]
            # A process group may have a short time limit. Then its waits end by themselves.
            thread.wait.timed |= limited and (thread.wait.kind == "collective" or thread.wait.what == GROUP)
            if thread.main and signal.SIGALRM in dump["caught"] and thread.wait.kind != "other":
                thread.wait = Wait(what="it waits, and an alarm may wake it")
    return found


def may_have_limits(dump):
    """Return whether process groups may have a short time limit: their call gives one, or it is in no file here."""
    trees = [syntax.parsed(text) for text in dump["sources"].values() if GROUP in text]
    calls = [call for tree in trees for call in names.calls_made(tree, GROUP, {})]
    return not calls or any(syntax.argument(call, 2, "timeout") or syntax.is_spread(call) for call in calls)


def joins(frame):
    """Return whether this is a function of torch in which a process joins the others, or leaves them: shutdown() calls
    _all_gather(), whose variable self_name is the name of this worker.
    """
    return frame.library and frame.function in ("init_rpc", "_all_gather")


def joined_of(dump, main):
    """Return {"worker", "rank", "world", "limit"}. A recording and the store know most, then torch's own variables."""
    known = [frame.value("name" if frame.function == "init_rpc" else "self_name", "") for frame in main if joins(frame)]
    joined = {"worker": "", "rank": -1, "world": 0, "limit": None}
    joined |= names.by_source(main, dump["argv"], dump["environ"])
    joined["worker"] = next(filter(None, known), joined["worker"])
    return joined | dump["joined"]
