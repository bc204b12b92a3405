"""Makes evidence of the dumps of processes.

A dump contains the local variables of each function: numbers, texts, and of everything else the class and the address.
It contains no global variables, no attributes and no names of functions. For these, the source is read.
"""

import collections
import contextlib
import linecache
import os
import re
import socket

from rpctrace import dumps, names, read, syntax, waits
from rpctrace.evidence import Call, Frame, Process, Seen, Thread, Wait
from rpctrace.sources import Line, argument

GROUP = "init_process_group"
POOL, GLOO = "pt_thread_pool", "pt_gloo_runloop"  # the names of RPC threads, and of two for each process group
NETWORK = ("TP_UV_loop", "pt_gloo")  # threads that run when a message has come
POLLS = {"TP_SHM_reactor", "gloo_tcp_loop"}  # these are never still
LIBRARY = re.compile(
    r"^<frozen|/lib/python3\.\d+/(?!site-packages/|dist-packages/)|/(site|dist)-packages/torch/|/rpctrace/record/"
)
LOCKING = "/distributed/optim/optimizer.py"  # torch's only `with` of a lock in which a program's code runs
OBJECT = re.compile(r"<([\w.]+) at 0x([0-9a-f]+)>")
OF_TORCH = re.compile(r"/torch/distributed/(\w+)/(?!functions\b|rref_proxy\b)")


def look(pids, address="", recorded=()):
    """Return what is seen of processes: their dumps, with the names of the workers and the source.

    `address`: HOST:PORT of the store that they use. `recorded`: what a recording tells of each, see read.py.
    """
    written = dumps.take(pids)
    keys = ("worker", "rank", "world", "limit")
    told = {one["pid"]: {key: one[key] for key in keys} for one in recorded if "worker" in one}
    for one in written:
        frames = [frame_of(one, each) for stack in one["stacks"] for each in stack["frames"]]
        paths = {frame.path for frame in frames if not frame.library}
        one["sources"] = {path: "".join(linecache.getlines(path)) for path in paths}
        words = set(re.findall(r"\w+", " ".join(one["sources"].values())))
        one["environ"] = {name: value for name, value in one["environ"].items() if name in words}  # it may hold secrets
        one["joined"] = told.get(one["pid"], {})
    unnamed = [one.pid for one in processes_of(written) if one.rpc and not one.named]
    workers = names.by_store(address) if address else {}
    if not address and (address := names.store_of(unnamed)):
        with contextlib.suppress(dumps.NoDump):  # it may be that of something else
            workers = names.by_store(address)
    for one in written if workers else ():
        for port in dumps.listens_on(one["pid"]) & workers.keys():
            one["joined"] |= workers[port]
    return written


def look_into(folder, address=""):
    """Return what is seen of the processes of this machine that record into a folder, and that have not left."""
    recorded = {one["pid"]: one for one in read.read(folder, most=0) if one["host"] == socket.gethostname()}
    living = {pid for pid in recorded if dumps.has_torch(pid)}
    if not living:
        raise dumps.NoDump(f"no process that records into {folder} runs on this machine")
    there = {"", *(recorded[pid].get("worker", "") for pid in living)}
    gone = {pid for pid, one in recorded.items() if one.get("worker", "") not in there and "left" not in one}
    return look(sorted(living | gone), address, recorded.values())


def processes_of(written):
    """Return the processes that look() has seen, in the order of their ranks."""
    for one in written:
        for path, text in one["sources"].items():
            linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path
    processes = [process_of(one) for one in written]
    counts = collections.Counter(one.name for one in processes)
    for one in processes:
        if counts[one.name] > 1 or not one.name:  # two that seem to have the same name have none
            one.name, one.named, one.rank = f"process {one.pid} on {one.host}", False, -1
    return sorted(processes, key=lambda one: (one.rank if one.rank >= 0 else 1 << 30, one.pid))


def process_of(written):
    """Return the Process of a dump. Its `joined` tells more than its source, and that more than its stacks."""
    stacks = {}  # number of a thread in the kernel -> its frames
    for one in written["stacks"]:
        stacks[one["os_thread_id"]] = [frame_of(written, each) for each in one["frames"]]
    main = stacks.get(written["pid"], [])
    joins = [frame for frame in main if frame.library and frame.function in ("init_rpc", "_all_gather")]
    known = [frame.value("name" if frame.function == "init_rpc" else "self_name", "") for frame in joins]
    joined = {"worker": next(filter(None, known), "")}
    joined |= names.by_source(main, written["argv"], written["environ"]) | written["joined"]
    comms = dict(written["comms"])
    pool = {tid for tid, comm in comms.items() if comm == POOL}
    moved = {comm for tid, comm in comms.items() if tid not in {*written["still"], *stacks}}
    process = Process(
        name=joined["worker"],
        host=written["host"],
        pid=written["pid"],
        rank=joined.get("rank", -1),
        world=joined.get("world") or 0,
        rpc=bool(pool or written["error"] or joins),
        groups=list(comms.values()).count(GLOO) // 2,
        lost=written["error"],
        ended=not comms,
        moment=written["moment"],
        pool=len(pool),
        free=len(pool - stacks.keys()),
        quiet=not any(comm.startswith(NETWORK) for comm in moved),
        still=moved <= POLLS,
    )
    groups = [call for path in written["sources"] for call in names.calls_made(syntax.parsed(path), GROUP, {})]
    limited = any(argument(call, 2, "timeout") for call in groups)
    number_threads(stacks)
    for one in written["stacks"]:
        tid, frames = one["os_thread_id"], stacks[one["os_thread_id"]]
        if not any(frame.path.endswith(waits.NOBODY) for frame in frames):
            thread = process.threads[tid] = thread_of(one, frames, tid in written["still"], joined.get("limit"))
            thread.main = frames is main
            thread.wait.timed |= limited and (thread.wait.kind == "collective" or thread.wait.what == GROUP)
            if frames is main and written["alarm"]:
                thread.wait = Wait(what="it waits, until an alarm at most")
    return process


def number_threads(stacks):
    """Give each variable that is a threading.Thread the number of this thread as its value: see Thread.join()."""
    numbers = {}  # address of a threading.Thread -> number
    for tid, frames in stacks.items():
        own = [frame.names.get("self") for frame in frames if frame.library and frame.function == "_bootstrap"]
        numbers |= {thread.id: tid for thread in own if thread}
    for seen in (seen for frames in stacks.values() for frame in frames for seen in frame.names.values()):
        seen.value = numbers.get(seen.id, seen.value)


def frame_of(written, one):
    """Return the Frame of one of py-spy's. Torch may be anywhere, if it was built from its source."""
    path = one["filename"] if one["filename"].startswith("<") else os.path.join(written["cwd"], one["filename"])
    library = bool(LIBRARY.search(path)) or path.startswith(tuple(written["torch"]))
    frame = Frame(path, one["name"].rpartition(".")[2], one["line"], library)
    frame.names = {each["name"]: variable(each) for each in one["locals"] or ()}
    frame.text = linecache.getline(path, one["line"]).strip()
    return frame


def variable(one):
    """Return what is known of one of py-spy's variables: it writes <class at address>, or the value."""
    name, text, address = one["name"], one["repr"] or "", one["addr"]
    if found := OBJECT.fullmatch(text):
        return Seen(name, found[1].rpartition(".")[2], int(found[2], 16))
    if text in ("None", "True", "False"):
        return Seen(name, "NoneType" if text == "None" else "bool")
    if text.startswith('"') and not text.endswith('..."'):
        return Seen(name, "str", address, value=text[1:-1])
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return Seen(name, "number", address, value=float(text) if "." in text else int(text))
    return Seen(name, "", address)


def thread_of(one, frames, still, limit):
    """Return what is known of one of py-spy's threads. `limit`: the time limit of calls without one."""
    calls = ""
    for frame in frames:
        if not frame.library or frame.path.endswith(LOCKING):
            frame.facts = syntax.facts_of(frame, calls)
        if "/rpctrace/record/" not in frame.path:  # the recorder only passes a call on
            calls = frame.function
    thread = Thread(one["os_thread_id"], one["thread_name"], ran=one["active"] and not still)
    thread.place, thread.wait = waits.read(frames, still, thread.ran)
    if thread.wait.kind == "answer":
        thread.wait.calls = calls_awaited(thread.wait, frames, limit)
    found = (served(frames[: number + 1]) for number in reversed(range(len(frames))))
    thread.serves = [call for call in found if call]
    thread.does = waits.does(frames)
    thread.holds = waits.held(frames)
    return thread


def calls_awaited(wait, frames, default):
    """Return the calls for the answer to one of which a thread waits, [] if that is not known."""
    own = []
    for frame in frames:
        own += [frame] * (not frame.library)
        if frame.function == "_run_function":
            break
    calls, limit = (wait.calls, 0) if wait.calls or not own else Line(own, default).calls_awaited()
    for frame in frames:
        if frame.function == "rpc_sync" and frame.library:
            calls = calls or [Call(None, None)]
            to, limit = frame.value("to"), frame.value("timeout", -1)
            calls[0].to = to if isinstance(to, str) else calls[0].to
            limit = calls[0].limit = limit if limit >= 0 else default
            break
    return [one.within(limit) for one in calls]


def served(frames):
    """Return the call that the outermost of these frames serves, or None if it does not."""
    if frames[-1].function != "_run_function" or not frames[-1].library or len(frames) < 2:
        return None
    within, own = frames[-4:-1], [frame for frame in frames if not frame.library]
    call = Call(None, within[-1].function, owes=any("/rpc/functions." in frame.path for frame in within))
    proxy = next((frame for frame in within if frame.function.startswith("_local_invoke")), None)
    where = OF_TORCH.search(within[-1].path)
    if proxy:
        call.name = proxy.value("func_name", call.name)
    elif where:
        call.name = f"torch.{where[1]}.{call.name}"
    elif own:
        of_object = own[-1].function == "__init__" and "self" in own[-1].names
        call.name = own[-1].names["self"].type if of_object else own[-1].function
        call.inner = own[-2].function if len(own) > 1 else ""
    return call
