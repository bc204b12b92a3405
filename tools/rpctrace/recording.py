"""Makes evidence of what is written about processes: by themselves into the .now of a recording, or by stacks.py.

What is written of a process is a JSON object. Times are nanoseconds since 1970, by the clock of its host.

    host, pid, ts           whose it is, and when it was written
    worker, rank, world     as init_rpc knows them, if it is known
    threads                 {number: name, since, ran, still, alarm, frames (the innermost first); of a dump: serves}
    open                    the bars that have not ended, of a recording: cat, name, ts, tid, args, begin, known
    and those of SAME       they are fields of evidence.Process, where it is said what they mean

A frame is written as an evidence.Frame, and a served call of a dump as an evidence.Call.
"""

import contextlib
import json
import pathlib

from rpctrace import waits
from rpctrace.evidence import Call, Evidence, Frame, Process, Seen, Thread, Wait

SAME = ("ts", "moved", "main", "exact", "rank", "rpc", "left", "lost", "ended", "pool", "free", "unseen")
SAME += ("group_rank", "members", "counts", "quiet", "still")
SILENT = 5.0  # seconds without a sign of life, after which a process does not let Python run


def evidence_in(folder, since=0):
    """Return what a folder tells about the processes of a run. `since`: those that have been seen later."""
    notes = {}
    for _, known in load(folder, "*.processes"):
        notes |= known
    found = load(folder, "*.now")
    alone = len({written["host"] for _, written in found}) == 1
    for path, written in found:  # the clocks of several hosts may differ, but they share the clock of the folder
        ahead = 0 if alone else written["ts"] - path.stat().st_mtime_ns
        for thing in (written, *written["open"], *written["threads"].values()):
            thing |= {name: thing[name] - ahead for name in ("ts", "moved", "since") if name in thing}
    processes = [process_of(written) for _, written in sorted(found, key=lambda one: one[1]["ts"])]
    evidence = evidence_of({one.name: one for one in processes if one.ts >= since}.values())  # the last of a name
    for process in evidence.processes:
        note = notes.get(f"{process.host}-{process.pid}", {})
        process.lost, process.ended = how_lost((evidence.now - process.ts) / 1e9, note)
    evidence.ended = [note["gone"] for note in notes.values() if "gone" in note]
    return evidence


def evidence_of(processes):
    processes = sorted(processes, key=lambda one: (one.rank if one.rank >= 0 else 1 << 30, one.pid))
    return Evidence(processes, max((one.ts for one in processes), default=0))


def load(folder, pattern):
    """Return (path, contents) of the files of this pattern. One that is being written is left out."""
    found = []
    for path in sorted(pathlib.Path(folder).rglob(pattern)):
        with contextlib.suppress(OSError, ValueError):
            found.append((path, json.loads(path.read_text())))
    return found


def how_lost(silent, note):
    """Return (how a process was lost that is silent for some seconds, or "" if it is there; whether it has ended)."""
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
    """Return the Process that is described."""
    bars = [bar for bar in written.get("open", ()) if bar["cat"] != "step" and (bar["cat"] != "wait" or bar["known"])]
    starting = [bar["args"]["worker"] for bar in bars if bar["name"] == "init_rpc" and bar["cat"] == "group"]
    name = written.get("worker") or (starting or [""])[0]
    known = {"named": bool(name), "rpc": bool(name), "world": written.get("world") or 0}
    known |= {field: written[field] for field in SAME if field in written}
    title = name or f"process {written['pid']} on {written['host']}"
    process = Process(title, written["host"], written["pid"], **known)
    process.calls = [made(bar) for bar in bars if bar["cat"] in ("async", "remote")]
    process.owed = [served(bar) for bar in bars if bar["cat"] == "held"]
    for tid, thread in written["threads"].items():
        mine = [bar for bar in bars if bar["tid"] == int(tid) and bar["cat"] not in ("async", "remote", "held")]
        mine.sort(key=lambda bar: bar["ts"])
        frames = [frame_of(frame) for frame in thread["frames"]]
        if not waits.is_nobody(frames):
            process.threads[int(tid)] = thread_of(int(tid), thread, frames, mine, process)
    return process


def frame_of(written):
    names = {name: Seen(**seen) for name, seen in written.get("names", {}).items()}
    return Frame(**written | {"names": names})


def thread_of(tid, written, frames, bars, process):
    thread = Thread(tid, written["name"], written.get("since", 0), main=tid == process.main)
    thread.place, wait = waits.read(frames, written["still"], written["ran"])
    if thread.main and written.get("alarm"):
        wait = Wait(what="it waits, until its alarm at most")
    thread.serves = [served(bar) for bar in bars if bar["cat"] == "run"]
    thread.serves += [Call(**call) for call in written.get("serves", ())]
    thread.does = waits.does(frames) | {
        bar["name"]: bar["args"].get("rank", -1) for bar in bars if bar["cat"] in ("group", "work")
    }
    thread.autograd = any("/torch/autograd/" in frame.path for frame in frames)
    back = wait.locks[0].id if wait.kind == "signal" and wait.locks else None  # the lock of a Condition, given back
    thread.holds = [lock for lock in waits.held(frames) if lock.id != back]
    thread.wait = (bars and during(bars[-1], wait, process.calls)) or wait
    if thread.wait.kind == "backward":
        thread.does["backward"] = -1
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
    match bar["cat"], bar["name"]:  # the name of a call is the program's: its function may be called "shutdown", too
        case "sync", _:
            return Wait("answer", answers=[[made(bar)]])
        case "wait", "to_here":
            return Wait("rref", answers=[[Call(known["owner"], None, rref=known["rref"], limit=args["limit"])]])
        case "wait", "wait":
            answers = [found for one in known["future"] if (found := completing(one, open_calls))]
            if not answers and wait.kind == "answer":  # of a built-in operator, which has no bar
                return None
            of_cpp = not known["future"] and not known["of_python"]
            return Wait("answer", answers=answers, made_by="C++" if of_cpp else "a thread")
        case "work", "backward":
            return Wait("backward", workers=args.get("workers", []))
        case "group", "shutdown":
            return Wait("shutdown", limit=args.get("limit") or 0.0, timed=not args.get("graceful", True))
        case "group", ("init_rpc" | "init_process_group") as name:
            return Wait("init", name, world=args.get("world") or 0)
    return None


def completing(one, open_calls):
    """Return the calls one of which completes a Future: that of a bar, or those of a method behind an RRef."""
    if not isinstance(one, list):
        return [call for call in open_calls if call.bar == one]
    owner, method = one
    names = (method, "torch.rpc._rref_typeof_on_owner")  # torch asks for the class of the object first
    return [call for call in open_calls if call.to == owner and call.name in names]
