"""Makes evidence of the dumps of processes. threads.py reads the stacks, and names.py finds the workers' names."""

import collections
import contextlib
import os
import re
import signal
import socket
import tokenize

from rpctrace import dumps, names, read, syntax, waits
from rpctrace.evidence import Process, Wait
from rpctrace.threads import OPTIMIZER, frame_of, number_threads, place_of, thread_of

GROUP = "init_process_group"
POOL, GLOO = "pt_thread_pool", "pt_gloo_runloop"  # the names of RPC threads, and of two for each process group
NETWORK = ("TP_UV_loop", "TP_CMA_loop", "pt_gloo")  # threads that run when a message has come
POLLS = {"TP_SHM_reactor", "gloo_tcp_loop"}  # these are never still
# Callbacks of Futures, and handlers of signals, may wake a thread, and stand on no stack before.
CALLBACKS = re.compile(r"\.then\(|\.add_done_callback\(")
# These signals have handlers of Python, of faulthandler and of the C library, which wake nobody.
USUAL = {signal.SIGINT, signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, 32, 33}


def look(pids, address="", recorded=()):
    """Return what is seen of processes: their dumps, with the names of the workers and the source.

    `address`: HOST:PORT of the store that they use. `recorded`: what a recording tells of each, see read.py.
    """
    written = dumps.take(pids)
    keys = ("worker", "rank", "world", "limit")
    told = {one["pid"]: {key: one[key] for key in keys} for one in recorded if "worker" in one}
    for one in written:
        places = {place_of(one, each) for stack in one["stacks"] for each in stack["frames"]}
        paths = [path for path, library in places if not library or path.endswith(OPTIMIZER)]
        one["sources"] = {path: source_of(path, one["started"]) for path in paths}
        words = set(re.findall(r"\w+", " ".join(one["sources"].values())))
        one["environ"] = {name: value for name, value in one["environ"].items() if name in words}  # it may hold secrets
        one["joined"] = told.get(one["pid"], {})
    # As far as the source and a recording tell. For the others the store is asked.
    unnamed = [one.pid for one in processes_of(written) if one.rpc and not one.named]
    workers = names.by_store(address) if address else {}
    if not address and (address := names.store_of(unnamed)):
        with contextlib.suppress(dumps.NoDump):  # it may be that of something else
            workers = names.by_store(address)
    for one in written if workers else ():
        for port in dumps.listens_on(one["pid"]) & workers.keys():
            one["joined"] |= workers[port]
    return written


def source_of(path, started):
    """Return the source of a file, or "" if it has been changed since a process has started."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # it is not there, or is no text of Python
        if os.stat(path).st_mtime < started + 1:  # the kernel's clock is coarse
            with tokenize.open(path) as file:
                return file.read()
    return ""


def look_into(folder, address=""):
    """Return what is seen of the processes of this machine that record into a folder, and that have not left."""
    recorded = {one["pid"]: one for one in read.read(folder, most=0) if one.get("host") == socket.gethostname()}
    living = {pid for pid in recorded if dumps.has_torch(pid)}
    if not living:
        raise dumps.NoDump(f"no process that records into {folder} runs on this machine")
    there = {"", *(recorded[pid].get("worker", "") for pid in living)}
    # Those that have ended without leaving RPC, unless a living process has taken their name.
    gone = {pid for pid, one in recorded.items() if one.get("worker", "") not in there and "left" not in one}
    return look(sorted(living | gone), address, recorded.values())


def processes_of(written):
    """Return the processes that look() has seen, in the order of their ranks."""
    processes = [process_of(one) for one in written]
    counts = collections.Counter(one.name for one in processes)
    for one in processes:
        if counts[one.name] > 1 or not one.name:  # two that seem to have the same name have none
            one.name, one.named, one.rank = f"process {one.pid} on {one.host}", False, -1
    return sorted(processes, key=lambda one: (one.rank if one.rank >= 0 else 1 << 30, one.pid))


def process_of(written):
    """Return the Process of a dump."""
    stacks = {}  # number of a thread in the kernel -> its frames
    for one in written["stacks"]:
        stacks[one["os_thread_id"]] = [frame_of(written, each) for each in one["frames"]]
    number_threads(stacks)  # so that Thread.join, below, shows for which thread it waits
    main, comms = stacks.get(written["pid"], []), dict(written["comms"])
    joined, pool = joined_of(written, main), {tid for tid, comm in comms.items() if comm == POOL}
    moved = {comm for tid, comm in comms.items() if tid not in {*written["still"], *stacks}}
    process = Process(
        name=joined["worker"],
        host=written["host"],
        pid=written["pid"],
        rank=joined["rank"],
        world=joined["world"] or 0,
        rpc=bool(pool or written["error"] or any(map(joins, main))),  # of one without stacks it is not known
        groups=list(comms.values()).count(GLOO) // 2,
        lost=written["error"],
        ended=not comms,
        moment=written["moment"],
        pool=len(pool),
        free=len(pool - stacks.keys()),
        quiet=not any(comm.startswith(NETWORK) for comm in moved),
        unseen=any(map(CALLBACKS.search, written["sources"].values())) or not USUAL.issuperset(written["caught"]),
        still=moved <= POLLS,
    )
    # A process group may have a short time limit if the call that makes it gives one, or if that call is not seen.
    groups = [call for text in written["sources"].values() for call in names.calls_made(syntax.parsed(text), GROUP, {})]
    limited = not groups or any(syntax.argument(call, 2, "timeout") or syntax.is_spread(call) for call in groups)
    for one in written["stacks"]:
        tid, frames = one["os_thread_id"], stacks[one["os_thread_id"]]
        if not any(frame.path.endswith(waits.NOBODY) for frame in frames):
            thread = process.threads[tid] = thread_of(one, frames, tid in written["still"], joined["limit"])
            thread.main = frames is main
            thread.wait.timed |= limited and (thread.wait.kind == "collective" or thread.wait.what == GROUP)
            if frames is main and signal.SIGALRM in written["caught"]:
                thread.wait = Wait(what="it waits, until an alarm at most")
    return process


def joins(frame):
    """Return whether this is a function of torch in which a process joins the others, or leaves them."""
    return frame.library and frame.function in ("init_rpc", "_all_gather")


def joined_of(written, main):
    """Return {"worker", "rank", "world", "limit"}. A recording and the store know most, the stack least."""
    known = [frame.value("name" if frame.function == "init_rpc" else "self_name", "") for frame in main if joins(frame)]
    joined = {"worker": next(filter(None, known), ""), "rank": -1, "world": 0, "limit": None}
    return joined | names.by_source(main, written["argv"], written["environ"]) | written["joined"]
