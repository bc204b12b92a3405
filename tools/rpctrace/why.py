"""Says who waits for whom in a program that hangs, from what its processes have written into a folder.

Each thread that waits is a node of a graph. What it needs is a list of groups: one member of each group must go on
before the thread can. A call needs the thread that serves it, and a lock the thread that holds it; such a group has one
member. A Condition may be notified by any other thread of its process, and a call may be served by any RPC thread; such
a group has many members. A thread that runs, sleeps, waits with a time limit or for something outside of the program,
or of which too little is known, needs nothing: it is alive. And then every thread is alive of whose groups each has a
living member. The others cannot go on, whatever happens. Only among these is a circle looked for.
"""

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import time

import read

SILENT = 5.0  # seconds without a sign of life, after which a process does not let Python run
SHORT = 30.0  # a call with a shorter time limit counts as a wait with a time limit: it goes on by itself
LONG = 3.0  # seconds: a shorter wait is nothing to report
LOCKS = ("lock", "RLock", "Condition")
HANGS, THREADS = "TROUBLESHOOTING.md#my-program-hangs-what-now", "CONCEPTS.md#threads-and-what-may-wait"
PATTERNS = {  # what it is, and the page that explains it; the more telling ones come first
    "pool": (
        "all RPC threads of a process wait, and only an RPC thread could end that",
        "TROUBLESHOOTING.md#a-call-does-not-even-time-out",
    ),
    "collective": (
        "a collective waits for its other members",
        "TROUBLESHOOTING.md#an-rpc-and-a-collective-wait-for-each-other",
    ),
    "lock": ("a thread waits while it holds a lock that others need", THREADS),
    "gone": ("a process has ended, and others wait for it", "TROUBLESHOOTING.md#shutdown-does-not-return"),
    "silent": ("a process does nothing any more, and others wait for it", HANGS),
    "absent": ("not all ranks have come", "TROUBLESHOOTING.md#the-ranks-do-not-meet"),
    "owed": ("nobody completes a Future that a served function has returned", HANGS),
    "backward": ("a backward pass waits for a gradient", "TROUBLESHOOTING.md#dist_autogradbackward-does-not-return"),
    "event": ("nobody sends the signal for which a thread waits", HANGS),
    "call": ("served functions wait for each other", THREADS),
    "busy": ("a thread is busy, and others wait for it", HANGS),
}


@dataclasses.dataclass
class Node:
    worker: str
    thread: str
    text: str  # what it waits for, or does
    kind: str  # a key of PATTERNS
    needs: list | None  # groups of keys of nodes; None: it is alive
    place: list | None = None  # file, line, function, the line itself
    seconds: float = 0.0
    since: float = 0.0  # in ns


class Run:
    """What a folder tells about the processes of a run. A process is the dict of its .now, and some more keys."""

    def __init__(self, folder, since=0):
        self.folder, self.nodes = folder, {}
        found = [one for one in standing(folder) if one["ts"] >= since]
        for process in found:
            take_apart(process)
        found.sort(key=lambda one: one["ts"])
        self.by_name = {one["name"]: one for one in found}  # a worker that was started again is there once
        self.processes = list(self.by_name.values())
        self.processes.sort(key=lambda one: (one.get("rank") is None, one.get("rank") or 0, one["pid"]))
        self.notes = {one["host"]: notes(folder, one["host"]) for one in self.processes}
        self.line_up_clocks()
        self.now = max((one["ts"] for one in self.processes), default=0)
        self.serving = {
            bar["args"]["call"]: (process, tid)
            for process in self.processes
            for tid, bars in process["bars"].items()
            for bar in bars
            if bar["cat"] == "run"
        }
        self.owed = {bar["args"]["call"]: (process, bar) for process in self.processes for bar in process["held"]}
        self.remotes = {
            bar["known"]["rref"]: (process, bar)
            for process in self.processes
            for bar in process["flying"]
            if bar["known"].get("rref")
        }
        for process in self.processes:
            process["lost"] = self.lost(process)
        self.instant = min((one["ts"] for one in self.processes if not one["lost"]), default=0)
        for process in self.processes:
            if not process["lost"]:
                for tid in process["threads"]:
                    self.node(("thread", process["name"], tid))
        self.alive = self.reduce()

    def line_up_clocks(self):
        """Put the times of several hosts on one axis, as far as calls between them tell how their clocks differ."""
        if len({process["host"] for process in self.processes}) < 2:
            return
        recorded = read.arrange(read.read(self.folder))
        calls = read.match([bar for process in recorded for bar in process["bars"].values()])
        clocks = read.line_up(calls, [process["host"] for process in recorded])
        for process in self.processes:
            shift, error = clocks.get(process["host"], (0, 0))
            process["ts"] += shift - error
            process["moved"] += shift
            for thing in (*process["open"], *process["threads"].values()):
                key = "ts" if "ts" in thing else "since"
                thing[key] += shift + error

    def lost(self, process):
        """Return (why nothing is heard of a process any more, whether it has ended), or None if it is there."""
        silent = (self.now - process["ts"]) / 1e9
        note = self.notes[process["host"]].get(str(process["pid"]), {})
        if "gone" in note and (ago := (self.now - note["gone"]) / 1e9) > 0.5:  # the others went on without it
            return f"{note['how']} {ago:.0f} s ago", True
        if silent > SILENT and note.get("stopped"):
            return f"is stopped for {silent:.0f} s, by SIGSTOP or a debugger", False
        if silent > SILENT and note:
            return f"does not let Python run for {silent:.0f} s: C code keeps the GIL", False
        if silent > SILENT:
            return f"gives no sign of life for {silent:.0f} s: it was killed or stopped", True
        return None

    # ------------------------------------------------------------------------------------------------------- nodes

    def node(self, key):
        """Return the node with this key. It makes the nodes that this one needs, too."""
        if key not in self.nodes:
            self.nodes[key] = None  # until it is made: circles end here
            kind, name, *rest = key
            process = self.by_name.get(name)
            if process and process["lost"] and kind in ("thread", "pool"):
                made = self.gone(process)
            else:
                made = getattr(self, f"make_{kind}")(process, *rest)
            self.nodes[key] = made
            for group in made.needs or ():
                for other in group:
                    self.node(other)
        return self.nodes[key]

    def gone(self, process):
        why, ended = process["lost"]
        frames = process["threads"].get(process["main"], {}).get("frames", [])
        place = next((frame[:4] for frame in frames if not frame[4].get("library")), None)
        kind, needs = ("gone", [[]]) if ended else ("silent", None)
        return Node(process["name"], "", why, kind, needs, place)

    def make_pool(self, process):
        """All RPC threads. Any one of them that ends what it does is enough."""
        busy = [tid for tid, thread in process["threads"].items() if self.is_of_torch(process, tid, thread)]
        size = process["pool"][0]
        text = f"all its {size} RPC threads are busy"
        needs = [[self.key(process, tid) for tid in busy]] if len(busy) >= size else None
        return Node(process["name"], "", text, "pool", needs)

    def is_of_torch(self, process, tid, thread):
        """Return whether torch has started this thread: it serves a call, or runs a callback or a hook."""
        serves = any(bar["cat"] == "run" for bar in process["bars"].get(tid, ()))
        return serves or ((thread["name"] is None or thread["name"].startswith("Dummy")) and tid != process["main"])

    def make_callers(self, process):
        """Whoever may call this process, and so run something on a free RPC thread of it."""
        others = [
            self.key(one, tid) for one in self.processes if one["rpc"] and not one["lost"] for tid in one["threads"]
        ]
        unknown = [("unknown", "", "a worker that was not recorded")] if self.unrecorded() else []
        return Node(process["name"], "", "a call", "call", [others + unknown])

    def unrecorded(self):
        worlds = [one.get("world") or 0 for one in self.processes]
        return max(worlds, default=0) > sum(one["rpc"] for one in self.processes)

    def make_unknown(self, _, text):
        return Node(text, "", "nothing is known of it", "busy", None)

    def make_absent(self, _, text):
        return Node(text, "", "it has not come" + self.unseen(), "absent", None)

    def unseen(self):
        """Return who hangs so early that nothing is known but that it is there."""
        seen = {one["file"] for one in self.processes}
        others = {path.name.rsplit(".", 2)[0] for path in read.recordings(self.folder)} - seen
        pids = ", ".join(sorted(name.rsplit("-", 2)[1] for name in others))
        return f" (nothing is known of these processes, which have not begun to meet: {pids})" if pids else ""

    def make_flying(self, process, number):
        bar = next(bar for bar in process["flying"] if bar["args"]["call"] == number)
        text, kind, needs = self.call(process, bar)
        return Node(process["name"], "", text, kind, needs, since=bar["ts"])

    def make_owed(self, process, number):
        bar = self.owed[number][1]
        text = f"the Future that {bar['name']} has returned in {process['name']}"
        return Node(text, "", "nobody completes it", "owed", [self.wakers(process, None)], since=bar["ts"])

    def make_thread(self, process, tid):
        thread = process["threads"][tid]
        bars, frames = process["bars"].get(tid, []), thread["frames"]
        bar = bars[-1] if bars else None
        place = next((frame[:4] for frame in frames if not frame[4].get("library")), None)
        if bar and bar["cat"] != "run":
            text, kind, needs = self.of_bar(process, tid, bar, frames)
            since = bar["ts"]
        else:
            text, kind, needs = self.of_frames(process, tid, thread)
            since = thread["since"]
        if needs is not None and since > self.instant:
            needs = None  # it was not so at the instant at which all of this was so
        seconds = max(0.0, (self.now - since) / 1e9)
        return Node(process["name"], self.title(process, tid), text, kind, needs, place, seconds, since)

    def key(self, process, tid):
        return ("thread", process["name"], tid)

    def title(self, process, tid):
        serves = [bar["name"] for bar in process["bars"].get(tid, ()) if bar["cat"] == "run"]
        thread = process["threads"][tid]
        if tid == process["main"]:
            return "main thread"
        if serves:
            return f"RPC thread that runs {serves[-1]}"
        return "thread of torch" if self.is_of_torch(process, tid, thread) else f"thread {thread['name']}"

    # Each of these returns (what is waited for, kind, needs).

    def of_bar(self, process, tid, bar, frames):
        if bar["cat"] == "sync":
            return self.call(process, bar)
        if bar["name"] == "to_here":
            return self.value(process, bar)
        if "future" in bar["known"]:
            return self.future(process, tid, bar["known"], frames)
        if bar["name"] == "backward":
            return self.backward(process, tid, bar)
        if bar["name"] == "shutdown":
            return self.shutdown(process, bar)
        if bar["cat"] == "group":
            return self.meeting(process, bar)
        return self.of_frames(process, tid, process["threads"][tid])

    def call(self, process, bar):
        """What becomes of a call at its callee."""
        to, name, limit = bar["args"]["to"], bar["name"], bar["args"].get("limit") or 0
        callee, number = self.by_name.get(to), bar["args"]["call"]
        age = (self.now - bar["ts"]) / 1e9
        end = f" (it fails by itself in {max(limit - age, 0):.0f} s)" if limit and not process["full"] else ""
        text, kind, needs = f"{to}'s answer to {name}{end}", "call", [[]]
        if number in self.serving:
            needs = [[self.key(*self.serving[number])]]
        elif number in self.owed:
            needs = [[("owed", self.owed[number][0]["name"], number)]]
        elif callee is None:
            text, needs = f"{text}; {to} was not recorded", None
        elif callee["lost"]:
            needs = [[("thread", to, callee["main"])]]
        elif age < 1:
            text, needs = f"{text}, made a moment ago", None
        elif was_served(callee, number):
            text, needs = f"{text}, which is on its way", None
        elif callee["full"]:
            text, needs = f"{text}; no RPC thread of {to} is free to run it", [[("pool", to)]]
            kind = "pool"
        else:
            text, needs = f"{text}, which has not begun", None
        if process["full"]:  # an answer needs an RPC thread here, too
            kind, text = "pool", f"{to}'s answer to {name}; no RPC thread of {process['name']} is free to take it"
            needs = [*(needs or ()), [("pool", process["name"])]]
        return text, kind, None if 0 < limit < SHORT and not process["full"] else needs

    def calls(self, process, bars):
        """Several calls, all of which have to be answered."""
        found = [self.call(process, bar) for bar in bars]
        text, kind, needs = min(found, key=lambda one: one[2] is None)
        if len(found) > 1:
            text = f"{len(found)} calls, for example {text}"
        stuck = [group for _, _, groups in found for group in groups or ()]
        return text, kind, stuck or needs

    def future(self, process, tid, known, frames):
        completes = known["future"]
        mine = [bar for bar in process["flying"] if bar["begin"] in completes]
        text, kind, needs = self.calls(process, mine) if mine else ("", "", [])
        for owner, name in (one for one in completes if isinstance(one, list)):  # a method of an object behind an RRef
            names = (name, "torch.rpc._rref_typeof_on_owner")
            like = [bar for bar in process["flying"] if bar["args"]["to"] == owner and bar["name"] in names]
            if like:
                text, kind, _ = self.call(process, like[0])
                needs = [*(needs or ()), [("flying", process["name"], bar["args"]["call"]) for bar in like]]
        if text:
            return text, kind, needs
        if builtin := next((frame[4] for frame in frames if "to" in frame[4]), None):
            callee, text = self.by_name.get(builtin["to"]), f"{builtin['to']}'s answer to {builtin['func']}"
            if callee and callee["lost"]:
                return text, "call", [[("thread", callee["name"], callee["main"])]]
            if callee and callee["full"]:
                return f"{text}; all RPC threads of {callee['name']} are busy", "pool", [[("pool", callee["name"])]]
            return f"{text}, which C++ runs", "busy", None
        if not completes and not known["of_python"]:
            return "a Future that C++ completes", "busy", None
        return f"a Future that a thread of {process['name']} completes", "event", [self.wakers(process, tid)]

    def value(self, process, bar):
        """to_here: the value of an RRef, whose constructor may still run."""
        owner = self.by_name.get(bar["known"]["owner"])
        if bar["known"]["rref"] in self.remotes:
            text, kind, needs = self.call(*self.remotes[bar["known"]["rref"]])
            return f"the value of an RRef: {text}", kind, needs
        text = f"the value of an RRef of {bar['known']['owner']}"
        if owner and (owner["lost"] or owner["full"]):
            key = ("thread", owner["name"], owner["main"]) if owner["lost"] else ("pool", owner["name"])
            return text, "pool" if owner["full"] else "gone", [[key]]
        return text, "busy", None

    def backward(self, process, tid, bar):
        """A hook that runs on a thread of torch, and a process without a free RPC thread, stop a backward pass."""
        ranks = bar["args"].get("workers", ())
        others = [one for one in self.processes if one.get("rank") in ranks and one["rpc"]]
        text = f"gradients from {', '.join(one['name'] for one in others) or 'nobody else'}"
        needs = [[("pool", one["name"])] for one in others if one["full"] or one["lost"]]
        open_ones = [
            bar for one in self.processes for bars in one["bars"].values() for bar in bars if bar["name"] == "backward"
        ]
        hooks = [
            [self.key(one, other)]
            for one in (process, *others)
            if not one["lost"] and len(open_ones) == 1
            for other in self.hooks(one)
            if other != tid
        ]
        if needs + hooks:
            return text, "backward", needs + hooks
        return f"{text}; no thread computes one, so probably it is never sent", "backward", None

    def hooks(self, process):
        """Return the threads that run a part of a backward pass in Python: neither calls, nor callbacks of RPC."""
        serving = {tid for tid, bars in process["bars"].items() if any(bar["cat"] == "run" for bar in bars)}
        size, free = process.get("pool", (0, 0))
        return [
            tid
            for tid, thread in process["threads"].items()
            if tid not in serving and self.is_of_torch(process, tid, thread)
            if size - free <= len(serving) or any("/torch/autograd/" in frame[0] for frame in thread["frames"])
        ]

    def shutdown(self, process, bar):
        limit, missing = bar["args"].get("limit"), []
        for other in self.processes:
            in_it = any(b["name"] == "shutdown" for bars in other["bars"].values() for b in bars)
            if other["rpc"] and other is not process and not in_it and not other.get("left"):
                missing.append(other)
        if limit or not bar["args"].get("graceful", True):
            return "the end of shutdown", "busy", None
        needs = [self.comes(other) for other in missing]
        text = f"the end of shutdown, which has not been called by {', '.join(one['name'] for one in missing)}"
        if self.unrecorded():
            text = "the end of shutdown, in workers that were not recorded"
            needs.append([("unknown", "", "other workers")])
        if not needs:
            text = "the end of shutdown, which all have called: calls are not answered"
            needs = [[self.key(one, tid)] for one, tid in self.serving.values()]
            needs += [[("owed", one["name"], number)] for number, (one, _) in self.owed.items()]
        return text, "shutdown", needs or None

    def comes(self, process):
        """The threads of a process, one of which may make the call that others wait for."""
        if process["lost"]:
            return [("thread", process["name"], process["main"])]
        threads = process["threads"].items()
        return [self.key(process, tid) for tid, thread in threads if not self.is_of_torch(process, tid, thread)]

    def meeting(self, process, bar):
        rpc = bar["name"] == "init_rpc"
        world = bar["args"].get("world" if rpc else "world_size") or 0
        come = {one.get("rank" if rpc else "group_rank") for one in self.processes}
        for one in self.processes:
            come |= {b["args"].get("rank") for bars in one["bars"].values() for b in bars if b["name"] == bar["name"]}
        missing = ", ".join(str(rank) for rank in range(world) if rank not in come)
        if not missing:
            return f"the other ranks, in {bar['name']}", "absent", None
        return f"rank {missing} of {world}, in {bar['name']}", "absent", [[("absent", "", f"rank {missing}")]]

    def of_frames(self, process, tid, thread):
        """What the innermost lines say. Without its variables, a thread counts as one that runs."""
        frames = thread["frames"]
        known = next((frame[4] for frame in frames if not frame[4].get("library")), {})
        inner = next((frame for frame in frames[:6] if "object" in frame[4] and frame[4].get("library")), None)
        if found := self.of_group(process, thread, known):
            return found
        if thread["ran"] and not inner:
            return "it computes", "busy", None
        if any(lock[1] in LOCKS for lock in known.get("takes", ())):
            return self.lock(process, tid, known["takes"], known.get("timed"))
        if inner:
            return self.signal(process, tid, frames, inner)
        if known.get("object", [""] * 2)[1].endswith("Store"):
            return "a key in a store, with a time limit", "busy", None
        if frames and "sleep(" in frames[0][3]:
            return "it sleeps", "busy", None
        return "it runs, or waits for something outside of the program", "busy", None

    def of_group(self, process, thread, known):
        """What a thread waits for in a process group, or None if it is in no collective."""
        frames, members = thread["frames"], process.get("members", ())
        if collective := [frame for frame in frames if "ranks" in frame[4]]:
            return self.collective(process, collective[-1][2], collective[-1][4]["group"])
        if known.get("calls") == "wait" and known["object"][1].endswith("Work") and len(members) == 1:
            return self.collective(process, "a collective", next(iter(members)))
        if frames and frames[0][2] == "_engine_run_backward" and thread["ran"] is False:  # DDP averages in C++
            for group, count in process.get("counts", {}).items():
                if self.behind(process, group, count):
                    return self.collective(process, "all_reduce of a backward pass", group)
        return None

    def signal(self, process, tid, frames, inner):
        """A thread waits in threading.py or queue.py."""
        joined = next((frame[4]["joins"] for frame in frames[:4] if frame[4].get("joins")), None)
        where = next((frame for frame in frames if not frame[4].get("library")), inner)
        if "_acquire_restore" in frames[0][3] or frames[0][2] == "_acquire_restore":
            return self.lock(process, tid, [["its Condition", *inner[4]["object"]]], False)
        kinds = [frame[4]["object"][0] for frame in frames[:6] if "object" in frame[4] and frame[4].get("library")]
        text = f"a signal of another thread of {process['name']} ({kinds[-1]})"
        if inner[4].get("timed"):
            return f"{text}, with a time limit", "busy", None
        if joined in process["threads"]:
            return f"the end of another thread: {where[3]}", "call", [[self.key(process, joined)]]
        return text, "event", [self.wakers(process, tid)]

    def wakers(self, process, tid):
        """Whoever may complete a Future, or notify, in this process."""
        ending = {other for other, bars in process["bars"].items() if any(bar["name"] == "shutdown" for bar in bars)}
        threads = [
            self.key(process, other)
            for other, thread in process["threads"].items()
            if other not in (tid, *ending) and not any("tqdm/_monitor.py" in frame[0] for frame in thread["frames"])
        ]
        flying = [("flying", process["name"], bar["args"]["call"]) for bar in process["flying"]]
        more = [("unknown", "", "open calls")] if process["more"] else []
        callers = [("callers", process["name"])] if process["rpc"] and not process["full"] else []
        return threads + flying + more + callers

    def lock(self, process, tid, locks, timed):
        """Its holder is known if it tells, or if it stands in a `with` block of the same object."""
        threads = process["threads"]
        for text, kind, number, owner in locks:
            for other, thread in threads.items():
                place = next(
                    (
                        f" since {os.path.basename(one[4])}:{one[5]}"
                        for one in thread.get("holds", ())
                        if one[2] == number
                    ),
                    "",
                )
                gave_it_back = any(
                    frame[4]["object"][1] == number
                    for frame in thread["frames"]
                    if frame[4].get("library") and "object" in frame[4]
                )
                holds = kind in LOCKS and place and not gave_it_back and (other != tid or kind == "lock")
                if not timed and (other == owner or (holds and owner is None)):
                    who = self.title(process, other) if other != tid else f"{self.title(process, other)} itself"
                    return f"`{text}`, which its {who} holds{place}", "lock", [[self.key(process, other)]]
        return f"`{locks[0][0]}`" + (", with a time limit" if timed else ", whose holder cannot be known"), "busy", None

    def behind(self, process, group, count):
        """Return the members of a group that have not begun the collective that this process has begun."""
        ranks = process.get("members", {}).get(group, ())
        others = [one for one in self.processes if one.get("group_rank") in ranks and one is not process]
        return [one for one in others if one["lost"] or one.get("counts", {}).get(group, -1) < count]

    def collective(self, process, name, group):
        ranks, count = process.get("members", {}).get(group, ()), process.get("counts", {}).get(group, 0)
        missing = self.behind(process, group, count)
        there = {one.get("group_rank") for one in self.processes}
        text = f"{name} of ranks {', '.join(map(str, ranks))}"
        if name in ("send", "recv", "isend", "irecv", "batch_isend_irecv"):
            return f"{text}: the other side", "busy", None
        needs = [self.comes(one) for one in missing]
        if any(rank not in there for rank in ranks):
            return f"{text}, of which some were not recorded", "collective", None
        for other in self.processes:  # another collective of the same group, at the same place in their order
            for tid, thread in other["threads"].items():
                frames = [frame for frame in thread["frames"] if frame[4].get("group") == group]
                if (
                    frames
                    and other is not process
                    and other not in missing
                    and frames[-1][2] != name
                    and "backward" not in name
                ):
                    needs.append([self.key(other, tid)])
                    missing.append(other)
        if not needs:
            return f"{text}, which all have begun", "collective", None
        return f"{text}; {', '.join(one['name'] for one in missing)} has not begun it", "collective", needs

    # ------------------------------------------------------------------------------------------------ what it means

    def reduce(self):
        """Return the keys of all nodes that are alive."""
        alive = {key for key, node in self.nodes.items() if node.needs is None}
        changed = True
        while changed:
            more = {
                key
                for key, node in self.nodes.items()
                if key not in alive and all(any(other in alive for other in group) for group in node.needs)
            }
            alive, changed = alive | more, bool(more)
        return alive

    def following(self, key):
        """Return (the nodes for which this one waits, whether each of them must go on)."""
        node = self.nodes[key]
        groups = [
            group for group in node.needs or () if key in self.alive or not any(one in self.alive for one in group)
        ]
        found = {}
        for group in groups:
            for other in group:
                if other[0] != "callers" and (other in self.alive) == (key in self.alive):
                    found[other] = len(group) == 1
        return found

    def circle(self):
        """Return the shortest circle of nodes that cannot go on; one of its steps at least leaves no choice."""
        best = []
        for start in self.nodes:
            if start in self.alive or start[0] != "thread":
                continue
            paths, seen = [(start,)], {start}
            while paths and not (best and len(paths[0]) >= len(best)):
                path = paths.pop(0)
                for other, must in self.following(path[-1]).items():
                    certain = must or any(self.following(a).get(b) for a, b in itertools.pairwise(path))
                    if other == start and certain and (not best or len(path) < len(best)):
                        best = list(path)
                    elif other not in seen:
                        seen.add(other)
                        paths.append((*path, other))
        mains = [at for at, key in enumerate(best) if key[2:] == (self.by_name[key[1]]["main"],)]
        return best[mains[0] :] + best[: mains[0]] if mains else best

    def waiting(self):
        """Return the keys of the threads that wait for others, the longest first."""
        found = [key for key, node in self.nodes.items() if key[0] == "thread" and node.needs and node.kind != "gone"]
        return sorted((key for key in found if self.nodes[key].place), key=lambda key: self.nodes[key].since)

    def ends(self):
        """Return the nodes at the ends of the chains: those for which the most others wait come first."""
        counts = collections.Counter()
        for start in self.waiting():
            todo, seen = [start], {start}
            while todo:
                key = todo.pop()
                following = self.following(key)
                if len(following) > 1 and not any(following.values()) and key in self.alive:
                    following = {}  # one of many threads may be the one: it is not known which
                if not following and (key != start or self.nodes[key].needs):
                    counts[key] += 1
                todo += [other for other in following if other not in seen]
                seen.update(following)
        order = sorted(counts, key=lambda key: (key in self.alive, self.nodes[key].kind == "event", -counts[key]))
        return [key for key in order if (key in self.alive) == (order[0] in self.alive)][:3]

    def verdict(self):
        """Return what is printed, as a dict for --json."""
        circle = self.circle()
        steps = [key for key in circle if key[0] != "flying"] or self.ends()
        kinds = {self.nodes[key].kind for key in steps}
        kind = next((kind for kind in PATTERNS if kind in kinds), "busy")
        waits = [key for key in self.waiting() if key not in circle and self.nodes[key].seconds >= 1]
        what, page = PATTERNS[kind]
        return {
            "verdict": "circle" if circle else "end" if waits else "nothing",
            "steps": [self.step(key) for key in steps] if circle or waits else [],
            "waits": [self.step(key) for key in waits],
            "pattern": what,
            "page": f"docs/{page}",
            "unseen": self.unseen(),
            "seconds": min((self.nodes[key].seconds for key in circle if key[0] == "thread"), default=0.0),
        }

    def step(self, key):
        node = self.nodes[key]
        file, line, function, text = node.place or ("", 0, "", "")
        place = {"file": file, "line": line, "function": function, "source": text}
        state = "gone" if node.kind in ("gone", "silent") else "waits" if node.needs and node.thread else "is"
        about = {"worker": node.worker, "thread": node.thread, "state": state, "what": node.text}
        return about | place | {"seconds": node.seconds}


def take_apart(process):
    """Sort the open bars of a process by what they mean."""
    bars = [bar for bar in process["open"] if not is_mark(bar)]
    starting = [bar["args"]["worker"] for bar in bars if bar["name"] == "init_rpc"]
    process["threads"] = {int(tid): thread for tid, thread in process["threads"].items()}
    process["flying"] = [bar for bar in bars if bar["cat"] in ("async", "remote")]
    process["held"] = [bar for bar in bars if bar["cat"] == "held"]
    process["bars"] = collections.defaultdict(list)  # thread -> those during which it waits or serves
    for bar in sorted(bars, key=lambda bar: bar["ts"]):
        if bar["cat"] not in ("async", "remote", "held"):
            process["bars"][bar["tid"]].append(bar)
    process["name"] = process.get("worker") or (starting or [f"process {process['pid']}"])[0]
    process["rpc"] = bool("worker" in process or starting)
    process["full"] = process.get("pool", [1, 1])[1] == 0


def standing(folder):
    """Return what the .now of each process says. A file that is being written is left out."""
    found = []
    for path in sorted(pathlib.Path(folder).rglob("*.now")):
        try:
            found.append(json.loads(path.read_text()) | {"file": path.stem, "in": str(path.parent)})
        except (OSError, ValueError):
            continue
    return found


def notes(folder, host):
    """Return {process id: what the starter on that host has seen of it}."""
    found = {}
    for path in pathlib.Path(folder).rglob(f"{host}.processes"):
        try:
            found |= json.loads(path.read_text())
        except (OSError, ValueError):
            continue
    return found


def is_mark(bar):
    """Return whether the program has marked this time: it says nothing about what its thread waits for."""
    return bar["cat"] == "step" or (bar["cat"] == "wait" and not bar["known"])


def was_served(process, number):
    """Return whether a process has run the function of this call."""
    line = f'"call": "{number}"'.encode()
    return any(line in path.read_bytes() for path in pathlib.Path(process["in"]).glob(f"{process['file']}.*.jsonl"))


def lines_of(said):
    """Return the report as lines."""
    if said["verdict"] == "nothing":
        return [f"No thread waits for another one{said['unseen']}."]
    title = {
        "circle": "CIRCLE: none of these can go on before the next one does, and the last one waits for the first.",
        "end": "END OF A CHAIN: for this the others wait.",
    }[said["verdict"]]
    lines = ["WHO WAITS FOR WHOM"] if said["waits"] else []
    groups = collections.defaultdict(list)
    for step in said["waits"]:
        groups[step["thread"], step["what"], step["file"], step["line"]].append(step)
    for steps in list(groups.values())[:12]:
        lines += of_step(steps, "  ")
    if len(groups) > 12:
        lines.append(f"  and {len(groups) - 12} more")
    lines.append(title)
    for number, step in enumerate(said["steps"]):
        lines += of_step([step], f"  {number + 1}. " if len(said["steps"]) > 1 else "  ")
    lines.append(f"{'This is' if said['verdict'] == 'circle' else 'Probably'}: {said['pattern']}. See {said['page']}")
    return lines


def of_step(steps, indent):
    """Return the lines of a step, or of several that wait for the same at the same place."""
    first, seconds = steps[0], max(step["seconds"] for step in steps)
    workers = ", ".join(dict.fromkeys(step["worker"] for step in steps))
    who = f"{workers}'s {first['thread']}" if first["thread"] else workers
    does = f"has waited {seconds:.0f} s for {first['what']}" if first["state"] == "waits" else f": {first['what']}"
    if len(steps) > 1:
        who, does = f"{len(steps)} threads ({workers}: {first['thread']})", does.replace("has waited", "have waited")
    if first["state"] == "is" and first["thread"] and not first["what"].startswith("it "):
        does = f": it waits for {first['what']}"
    line = f"{indent}{who} {does}".replace(" : ", ": ")
    if not first["file"]:
        return [line]
    place = f"{os.path.basename(first['file'])}:{first['line']}, in {first['function']}: {first['source']}"
    return [line, " " * len(indent) + f"    {place}"]


def explain(folder, as_json=False, since=0):
    """Return the report on a folder as text, and its verdict."""
    said = Run(folder, since).verdict()
    return json.dumps(said, indent=1) if as_json else "\n".join(lines_of(said)), said


def is_stalled(folder, seconds, since):
    """Return whether nothing has moved for so long although threads wait, or a circle is so old."""
    run = Run(folder, since)
    if not run.processes:
        return False
    ended = [note["gone"] for known in run.notes.values() for note in known.values() if "gone" in note]
    moved = max([process["moved"] for process in run.processes] + ended)  # that a process ends moves something, too
    said = run.verdict()
    quiet = time.time_ns() - moved > seconds * 1e9 and said["verdict"] != "nothing"
    return quiet or (said["verdict"] == "circle" and said["seconds"] >= seconds)
