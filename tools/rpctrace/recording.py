"""The evidence that a recording contains: the bars that are open, and where each thread stands."""

import contextlib
import json
import pathlib

from rpctrace import read, waits
from rpctrace.evidence import Call, Evidence, Meeting, Process, Seen, Thread, Wait

SILENT = 5.0  # seconds without a sign of life, after which a process does not let Python run


def evidence_in(folder, since=0):
    """Return what a folder tells about the processes of a run. `since`: those that have been seen later."""
    written = sorted(load(folder, "*.now"), key=lambda one: one["ts"])
    processes = {
        process.name: process for process in map(process_of, written) if process.ts >= since
    }  # the last of a name
    processes = sorted(processes.values(), key=lambda one: (one.rank if one.rank >= 0 else 1 << 30, one.pid))
    notes = {}
    for known in load(folder, "*.processes"):
        notes |= known
    line_up_clocks(folder, processes)
    now = max((one.ts for one in processes), default=0)
    for process in processes:
        process.lost, process.ended = how_lost(process, now, notes.get(f"{process.host}-{process.pid}", {}))
    seen = {f"{one.host}-{one.pid}" for one in processes}
    others = sorted({path.name.rpartition("-")[0] for path in read.recordings(folder)} - seen)
    begun = [f"{name.rpartition('-')[2]} {notes.get(name, {}).get('how', '')}".strip() for name in others]
    return Evidence(processes, now, begun, [note["gone"] for note in notes.values() if "gone" in note])


def load(folder, pattern):
    """Return what the files of this pattern contain. One that is being written is left out."""
    found = []
    for path in sorted(pathlib.Path(folder).rglob(pattern)):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found


def line_up_clocks(folder, processes):
    """Put the times of several hosts on one axis, as far as calls between them tell how their clocks differ."""
    if len({one.host for one in processes}) < 2:
        return
    recorded = read.arrange(read.read(folder, most=10_000))
    if not recorded:
        return
    calls = read.match([bar for process in recorded for bar in process["bars"].values()])
    clocks = read.line_up(calls, [process["host"] for process in recorded])
    for process in processes:
        shift, error = clocks.get(process.host, (0, 0))
        process.ts += shift - error
        process.moved += shift
        waiting = [thread.wait for thread in process.threads.values()]
        for thing in (*process.threads.values(), *waiting, *process.calls, *process.owed):
            thing.since += shift + error


def how_lost(process, now, note):
    """Return (how a process was lost, or "" if it is there; whether it has ended)."""
    silent = (now - process.ts) / 1e9
    if "gone" in note and silent > 1.5:  # the others went on without it
        return f"{note['how']} {silent:.0f} s ago", True
    if silent <= SILENT:
        return "", False
    if not note:
        return f"gives no sign of life for {silent:.0f} s: killed, stopped, or its C code keeps the GIL", False
    if note["stopped"]:
        return f"is stopped for {silent:.0f} s, by SIGSTOP or a debugger", False
    return f"does not let Python run for {silent:.0f} s: C code keeps the GIL", False


def process_of(written):
    """Return the Process that a .now describes."""
    bars = [bar for bar in written["open"] if bar["cat"] != "step" and (bar["cat"] != "wait" or bar["known"])]
    meets = [bar for bar in bars if bar["cat"] == "group"]
    starting = [bar["args"]["worker"] for bar in meets if bar["name"] == "init_rpc"]
    size, free = written.get("pool", (0, 1))
    process = Process(
        name=written.get("worker") or (starting or [f"process {written['pid']}"])[0],
        host=written["host"],
        pid=written["pid"],
        rank=written.get("rank", -1),
        world=written.get("world") or 0,
        rpc=bool("worker" in written or starting),
        left=bool(written.get("left")),
        ts=written["ts"],
        moved=written["moved"],
        main=written["main"],
        calls=[made(bar) for bar in bars if bar["cat"] in ("async", "remote")],
        owed=[served(bar) for bar in bars if bar["cat"] == "held"],
        meets=[Meeting(bar["name"], bar["tid"], bar["args"].get("rank", -1)) for bar in meets],
        does=[bar["name"] for bar in bars if bar["cat"] in ("group", "work")],
        unseen=written["more"] + max(0, written.get("unseen", 0)),
        pool=size,
        free=free,
        group_rank=written.get("group_rank", -1),
        members=written.get("members", {}),
        counts=written.get("counts", {}),
    )
    for tid, thread in written["threads"].items():
        mine = [bar for bar in bars if bar["tid"] == int(tid) and bar["cat"] not in ("async", "remote", "held")]
        names = [{name: Seen(**seen) for name, seen in frame.pop("names", {}).items()} for frame in thread["frames"]]
        frames = [waits.Frame(**frame, names=known) for frame, known in zip(thread["frames"], names, strict=True)]
        if not waits.is_nobody(frames):
            mine.sort(key=lambda bar: bar["ts"])
            process.threads[int(tid)] = thread_of(int(tid), thread, frames, mine, written, process.calls)
    return process


def thread_of(tid, written, frames, bars, process, open_calls):
    thread = Thread(tid, written["name"], written["since"], main=tid == process["main"])
    thread.place, wait = waits.read(frames, written["still"], written["ran"])
    if thread.main and 0 < process["alarm"] < waits.ALARM:
        wait = Wait(what="it waits, until its alarm at most")
    if wait.kind == "engine" and process["cuda"]:
        wait = Wait(what="it runs, or waits for something outside")
    thread.serves = [served(bar) for bar in bars if bar["cat"] == "run"]
    thread.autograd = any("/torch/autograd/" in frame.path for frame in frames)
    back = wait.locks[0].id if wait.kind == "signal" and wait.locks else None  # the lock of a Condition, given back
    thread.holds = [lock for lock in waits.held(frames) if lock.id != back]
    thread.wait = (bars and during(bars[-1], wait, open_calls)) or wait
    thread.wait.since = bars[-1]["ts"] if thread.wait is not wait else thread.since
    return thread


def served(bar):
    return Call(None, bar["name"], bar["args"]["call"], since=bar["ts"])


def made(bar):
    limit = bar["args"].get("limit") or 0.0
    known = {"rref": bar["known"].get("rref", ""), "bar": bar["begin"]}
    return Call(bar["args"]["to"], bar["name"], bar["args"]["call"], limit, bar["ts"], **known)


def during(bar, wait, open_calls):
    """Return what a thread waits for during a bar, or None if its lines tell it better."""
    known, args = bar["known"], bar["args"]
    if bar["cat"] == "sync":
        return Wait("answer", answers=[[made(bar)]])
    if bar["name"] == "to_here":
        return Wait("rref", answers=[[Call(known["owner"], None, rref=known["rref"], limit=args["limit"])]])
    if bar["name"] == "wait":
        answers = [found for one in known["future"] if (found := completing(one, open_calls))]
        if not answers and wait.kind == "answer":  # of a built-in operator, which has no bar
            return None
        of_cpp = not known["future"] and not known["of_python"]
        return Wait("answer", answers=answers, made_by="C++" if of_cpp else "a thread")
    if bar["name"] == "backward":
        return Wait("backward", workers=args.get("workers", []))
    if bar["name"] == "shutdown":
        return Wait("shutdown", limit=args.get("limit") or 0.0, timed=not args.get("graceful", True))
    if bar["name"] in ("init_rpc", "init_process_group"):
        return Wait("init", bar["name"], rank=args.get("rank", -1), world=args.get("world") or 0)
    return None


def completing(one, open_calls):
    """Return the calls one of which completes a Future: that of a bar, or those of a method behind an RRef."""
    if not isinstance(one, list):
        return [call for call in open_calls if call.bar == one]
    owner, method = one
    names = (method, "torch.rpc._rref_typeof_on_owner")  # torch asks for the class of the object first
    return [call for call in open_calls if call.to == owner and call.name in names]
