"""Says who waits for whom in a program that hangs, from what its processes have written into a folder.

Each thread that waits is a node of a graph. What it needs is a list of groups: one member of each group must go on
before the thread can. A call needs the thread that serves it, and a lock the thread that holds it; such a group has one
member. A Condition may be notified by any other thread of its process, and a call may be served by any RPC thread; such
a group has many members. A thread that runs, sleeps, waits with a time limit or for something outside of the program,
or of which too little is known, needs nothing: it is alive. And then every thread is alive of whose groups each has a
living member. The others cannot go on, whatever happens. Only among these is a circle looked for.
"""

import collections
import contextlib
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
ANY = "a collective"
WAITS = {  # the name of a bar, or "sync" -> the method that knows what is waited for
    "sync": "call",
    "to_here": "value",
    "wait": "future",
    "backward": "backward",
    "shutdown": "shutdown",
    "init_rpc": "start",
    "init_process_group": "start",
}
BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv")  # no collectives
HANGS, THREADS = "TROUBLESHOOTING.md#my-program-hangs-what-now", "CONCEPTS.md#threads-and-what-may-wait"
BACKWARD = "TROUBLESHOOTING.md#dist_autogradbackward-does-not-return"
COLLECTIVE = "TROUBLESHOOTING.md#an-rpc-and-a-collective-wait-for-each-other"
PATTERNS = {  # what it is, and the page that explains it; the more telling ones come first
    "pool": ("all RPC threads of a process wait for RPCs", "TROUBLESHOOTING.md#a-call-does-not-even-time-out"),
    "collective": ("a collective waits for its other members", COLLECTIVE),
    "lock": ("a thread waits while it holds a lock that others need", THREADS),
    "gone": ("a process has ended, and others wait for it", "TROUBLESHOOTING.md#shutdown-does-not-return"),
    "silent": ("a process does nothing any more, and others wait for it", HANGS),
    "absent": ("not all ranks have come", "TROUBLESHOOTING.md#the-ranks-do-not-meet"),
    "owed": ("nobody completes a Future that a served function has returned", HANGS),
    "backward": ("a backward pass waits for a gradient", BACKWARD),
    "event": ("nobody sends the signal for which a thread waits", HANGS),
    "call": ("served functions wait for each other", THREADS),
    "outside": ("others wait for something that is not known here, or ends by itself", HANGS),
    "runs": ("a thread is busy, and others wait for it", HANGS),
}


@dataclasses.dataclass
class Node:
    worker: str
    thread: str  # "" for what is no thread
    what: str  # it waits for, or does
    kind: str  # a key of PATTERNS
    needs: list  # groups of keys of nodes
    place: list | None = None  # file, line, function, the line itself
    since: float = 0.0  # in ns
    seconds: float = 0.0


class Run:
    """What a folder tells about the processes of a run. A process is the dict of its .now, and some more keys."""

    def __init__(self, folder, since=0):
        self.folder, self.nodes, self.notes = folder, {}, {}
        found = sorted(load(folder, "*.now"), key=lambda one: one["ts"])
        self.by_name = {one["name"]: one for one in map(take_apart, found) if one["ts"] >= since}  # the last of a name
        self.processes = sorted(self.by_name.values(), key=lambda one: (one.get("rank", 1 << 30), one["pid"]))
        for known in load(folder, "*.processes"):
            self.notes |= known
        self.line_up_clocks()
        self.now = max((one["ts"] for one in self.processes), default=0)
        for process in self.processes:
            process["lost"] = self.lost(process)
        self.instant = min((one["ts"] for one in self.processes if not one["lost"]), default=0)
        self.serves, self.makes = {}, {}  # number of a call -> key of who serves it; id of an RRef -> what makes it
        for process in self.processes:
            for tid, thread in process["threads"].items():
                self.serves |= {number: self.key(process, tid) for number in thread["runs"]}
            for bar in process["held"]:
                self.serves.setdefault(bar["args"]["call"], self.key(process, "held", bar["args"]["call"]))
            self.makes |= {bar["known"]["rref"]: (process, bar) for bar in process["calls"] if "rref" in bar["known"]}
        for process in self.processes:
            self.make_nodes(process)
        self.alive = self.reduce()

    def line_up_clocks(self):
        """Put the times of several hosts on one axis, as far as calls between them tell how their clocks differ."""
        if len({one["host"] for one in self.processes}) < 2:
            return
        recorded = read.arrange(read.read(self.folder))
        calls = read.match([bar for process in recorded for bar in process["bars"].values()])
        clocks = read.line_up(calls, [process["host"] for process in recorded])
        for process in self.processes:
            shift, error = clocks.get(process["host"], (0, 0))
            process["ts"] += shift - error
            process["moved"] += shift
            for thing in (*process["open"], *process["threads"].values()):
                thing["ts"] += shift + error

    def lost(self, process):
        """Return (how a process was lost, whether it has ended), or None if it is there."""
        silent, note = (self.now - process["ts"]) / 1e9, self.notes.get(process["file"], {})
        if "gone" in note and (ago := (self.now - note["gone"]) / 1e9) > 0.5:  # the others went on without it
            return f"{note['how']} {ago:.0f} s ago", True
        if silent <= SILENT:
            return None
        if not note:
            return f"gives no sign of life for {silent:.0f} s: it was killed or stopped", True
        if note["stopped"]:
            return f"is stopped for {silent:.0f} s, by SIGSTOP or a debugger", False
        return f"does not let Python run for {silent:.0f} s: C code keeps the GIL", False

    # ------------------------------------------------------------------------------------------------------- nodes

    def key(self, process, what, number=0):
        """Return the key of a thread (`what` is its number) or of another node. All of a lost process is one node."""
        return (process["name"], "gone", 0) if process["lost"] else (process["name"], what, number)

    def add(self, key, *fields):
        self.nodes[key] = node = Node(*fields)
        node.seconds = max(0.0, (self.now - node.since) / 1e9)
        if node.since > self.instant - 1e9:
            node.needs = []  # it is not certain that this was so at the instant at which all the rest was so
        return key

    def make_nodes(self, process):
        name, threads = process["name"], process["threads"]
        if process["lost"]:
            how, ended = process["lost"]
            place = own(threads.get(process["main"], {"frames": []}))[:4]
            self.add((name, "gone", 0), name, "", how, *(("gone", [[]]) if ended else ("silent", [])), place)
            return
        for tid, thread in threads.items():
            bar = thread["bars"][-1] if thread["bars"] else {"cat": "run"}
            wait = WAITS.get(bar["name"] if bar["cat"] in ("wait", "group", "work") else bar["cat"])
            found = getattr(self, wait)(process, tid, bar) if wait else self.of_frames(process, tid)
            since = bar["ts"] if wait else thread["ts"]
            self.add((name, tid, 0), name, title(thread), *found, own(thread)[:4], since)
        for bar in process["calls"]:
            self.add((name, "call", bar["args"]["call"]), name, "", *self.call(process, 0, bar), None, bar["ts"])
        for bar in process["held"]:
            what = f"the Future that {bar['name']} has returned: nobody completes it"
            self.add((name, "held", bar["args"]["call"]), name, "", what, "owed", [self.wakers(process, 0)])
        callers = [self.key(one, tid) for one in self.processes if one["rpc"] for tid in one["threads"]]
        self.add((name, "callers", 0), name, "", "a call", "call", [callers + self.unrecorded()])

    def unrecorded(self):
        """Return the key of whoever was not recorded, in a list, or an empty list if there is nobody."""
        worlds = [one.get("world") or 0 for one in self.processes]
        missing = max(worlds, default=0) > sum(one["rpc"] for one in self.processes)
        return [self.absent("a worker that was not recorded")] if missing else []

    def absent(self, who):
        """Return the key of somebody of whom nothing is known, except perhaps that some processes are there."""
        seen = {one["file"] for one in self.processes}
        others = {path.name.rpartition("-")[0] for path in read.recordings(self.folder)} - seen
        pids = ", ".join(sorted(name.rpartition("-")[2] for name in others))
        there = f" (only these processes are there, which have not begun to meet: {pids})" if pids else ""
        return self.add((who, "absent", 0), who, "", f"nothing is known of it{there}", "absent", [])

    def pool(self, name):
        """Return the key of the RPC threads of a worker: if all are busy, one of them has to end what it does."""
        if name not in self.by_name:
            return self.absent(name)
        process = self.by_name[name]
        key, busy = self.key(process, "pool"), [self.key(process, tid) for tid in process["of_torch"]]
        if process["lost"]:
            return key
        if process["full"] and len(busy) >= process["pool"][0]:
            return self.add(key, name, "", f"all its {len(busy)} RPC threads are busy", "pool", [busy])
        what = "it has a free RPC thread, and runs no Python function for this"
        return self.add(key, name, "", what, "outside", [])

    # Each of these returns (what is waited for, kind, needs) for the bar during which a thread waits.

    def call(self, process, _, bar):
        """A call waits for who serves it, and for an RPC thread that takes the answer."""
        to, number, limit = bar["args"]["to"], bar["args"]["call"], bar["args"].get("limit") or 0
        needs = [[self.serves[number] if number in self.serves else self.pool(to)]]
        if process["full"]:
            what = f"{to}'s answer to {bar['name']}; no RPC thread of {process['name']} is free to take it"
            return what, "pool", [*needs, [self.pool(process["name"])]]
        left = f" (it fails by itself in {max(0, limit - (self.now - bar['ts']) / 1e9):.0f} s)" if limit else ""
        return f"{to}'s answer to {bar['name']}{left}", "call", [] if 0 < limit < SHORT else needs

    def value(self, _, tid, bar):
        """The value of an RRef, whose constructor may still run."""
        rref, owner = bar["known"]["rref"], bar["known"]["owner"]
        if rref not in self.makes:
            return f"the value of an RRef of {owner}", "call", [[self.pool(owner)]]
        what, kind, needs = self.call(self.makes[rref][0], tid, self.makes[rref][1])
        return f"the value of an RRef: {what}", kind, needs

    def future(self, process, tid, bar):
        """It is completed by calls, by a call of a method behind an RRef, by C++, or by whoever does it."""
        completes, frames = bar["known"]["future"], process["threads"][tid]["frames"]
        found = [self.call(process, tid, call) for call in process["calls"] if call["begin"] in completes]
        for owner, method in (one for one in completes if isinstance(one, list)):
            names = (method, "torch.rpc._rref_typeof_on_owner")  # torch asks for the class of the object first
            like = [call for call in process["calls"] if call["args"]["to"] == owner and call["name"] in names]
            keys = [self.key(process, "call", call["args"]["call"]) for call in like]
            found += [(self.call(process, tid, call)[0], "call", [keys]) for call in like[:1]]
        if found:  # all of them have to be answered
            what, kind, _ = max(found, key=lambda one: len(one[2]))
            several = f"{len(found)} calls, for example " if len(found) > 1 else ""
            return several + what, kind, [group for _, _, needs in found for group in needs]
        if operator := next((frame[4] for frame in frames if "to" in frame[4]), None):  # C++ makes and serves this call
            return f"{operator['to']}'s answer to {operator['func']}", "call", [[self.pool(operator["to"])]]
        if not completes and not bar["known"]["of_python"]:
            return "a Future that C++ completes", "outside", []
        return f"a Future that a thread of {process['name']} completes", "event", [self.wakers(process, tid)]

    def backward(self, process, tid, bar):
        """A hook that runs on a thread of torch, and a process without a free RPC thread, stop a backward pass."""
        ranks = bar["args"].get("workers", ())
        others = [one for one in self.processes if one.get("rank") in ranks and one["rpc"]]
        needs = [[self.pool(one["name"])] for one in others if one["full"] or one["lost"]]
        if sum("backward" in one["does"] for one in self.processes) == 1:  # otherwise it is not known whose hook it is
            there = [one for one in (process, *others) if not one["lost"]]
            needs += [[self.key(one, hook)] for one in there for hook in hooks(one) if hook != tid]
        doubt = "" if needs else "; no thread computes one, so probably it is never sent"
        return f"gradients from {names_of(others) or 'nobody else'}{doubt}", "backward", needs

    def shutdown(self, process, _, bar):
        if bar["args"].get("limit") or not bar["args"].get("graceful", True):
            return "the end of shutdown", "outside", []
        members = {one["name"]: one for one in self.processes if one["rpc"] and one is not process}
        members |= {key[0]: None for key in self.unrecorded()}
        found = self.meeting("shutdown", members, lambda one: "shutdown" in one["does"] or one.get("left"))
        answers = "the end of shutdown: calls are not answered", "call", [[key] for key in self.serves.values()]
        return found if found[2] else answers

    def start(self, _, __, bar):
        """init_rpc or init_process_group."""
        rank, begun = "rank" if bar["name"] == "init_rpc" else "group_rank", collections.defaultdict(dict)
        for one in self.processes:
            begun |= {one.get(rank): one}
            begun |= {other["args"].get("rank"): one for other in one["open"] if other["name"] == bar["name"]}
        members = {f"rank {number}": begun.get(number) for number in range(bar["args"].get("world") or 0)}
        return self.meeting(f"{bar['name']} of {len(members)} ranks", members, lambda one: True)

    def collective(self, process, name, group):
        if name in BETWEEN_TWO or group not in process.get("members", ()):
            return f"{name}: the other side", "outside", []
        ranks, count = process["members"][group], process["counts"][group]
        by_rank = {one.get("group_rank"): one for one in self.processes}
        members = {
            f"rank {rank}" if rank not in by_rank else by_rank[rank]["name"]: by_rank.get(rank) for rank in ranks
        }

        def has_begun(other):  # the same one, at the same place in the order of this group
            frames = [frame for thread in other["threads"].values() for frame in thread["frames"]]
            inside = {frame[2] for frame in frames if frame[4].get("group") == group}
            begun = other.get("counts", {}).get(group, -1)
            return begun > count or (begun == count and (not inside or name in {*inside, ANY}))

        return self.meeting(f"{name} of ranks {', '.join(map(str, ranks))}", members, has_begun)

    def meeting(self, what, members, has_come):
        """Everybody has to come. `members`: {who: its process, or None if nothing is known of it}."""
        missing = {who: one for who, one in members.items() if not one or one["lost"] or not has_come(one)}
        needs = [self.comes(one) if one else [self.absent(who)] for who, one in missing.items()]
        what = f"{', '.join(missing)} to begin {what}" if missing else f"the end of {what}, which all have begun"
        return what, "collective", needs

    def comes(self, process):
        """The threads of a process, one of which may make the call that others wait for."""
        return [self.key(process, tid) for tid in process["threads"] if tid not in process["of_torch"]]

    # And these return it for a thread of which only the lines are known.

    def of_frames(self, process, tid, *_):
        """Without its variables, a thread counts as one that runs."""
        thread, known = process["threads"][tid], own(process["threads"][tid])[4]
        frames, groups = thread["frames"], process.get("members", ())
        signals = [frame for frame in frames[:6] if "object" in frame[4] and frame[4]["library"]]
        if begun := [frame for frame in frames if "group" in frame[4]]:
            return self.collective(process, begun[-1][2], begun[-1][4]["group"])
        if known.get("calls") == "wait" and known["object"][1].endswith("Work") and len(groups) == 1:
            return self.collective(process, ANY, *groups)
        if frames[0][2] == "_engine_run_backward" and thread["ran"] is False:  # DDP averages the gradients in C++
            found = [self.collective(process, ANY, group) for group in groups]
            return next((one for one in found if one[2]), ("the end of a backward pass", "outside", []))
        takes = [lock for lock in known.get("takes", ()) if lock[1] in LOCKS]
        if takes and (signals or not thread["ran"]):
            return self.lock(process, tid, takes, known.get("timed"))
        if signals:
            return self.signal(process, tid, signals)
        if known.get("object", ["", ""])[1].endswith("Store"):
            return "a key in a store, with a time limit", "outside", []
        does = "sleeps" if "sleep(" in frames[0][3] else "runs, or waits for something outside"
        return "it computes" if thread["ran"] else f"it {does}", "runs", []

    def signal(self, process, tid, signals):
        """A thread waits in threading.py or queue.py."""
        frames, inner = process["threads"][tid]["frames"], signals[0][4]
        if "_acquire_restore" in frames[0][2] + frames[0][3]:  # it has the signal, and needs the lock again
            return self.lock(process, tid, [["its Condition", *inner["object"]]], False)
        joined = next((frame[4]["joins"] for frame in signals if frame[4].get("joins")), None)
        if inner["timed"]:
            return f"a signal ({signals[-1][4]['object'][0]}), with a time limit", "outside", []
        if joined in process["threads"]:
            return f"the end of {title(process['threads'][joined])}", "call", [[self.key(process, joined)]]
        kind = signals[-1][4]["object"][0]
        return f"a signal of another thread of {process['name']} ({kind})", "event", [self.wakers(process, tid)]

    def wakers(self, process, tid):
        """Whoever may complete a Future, or notify, in this process: its threads, its calls, and who calls it."""
        found = [self.absent("a call that was not recorded")] if process["more"] else []
        for other, thread in process["threads"].items():
            ends = any(bar["name"] == "shutdown" for bar in thread["bars"])
            if other != tid and not ends and not any("tqdm/_monitor.py" in frame[0] for frame in thread["frames"]):
                found.append(self.key(process, other))
        found += [self.key(process, "call", bar["args"]["call"]) for bar in process["calls"]]
        return found + ([self.key(process, "callers")] if process["rpc"] and not process["full"] else [])

    def lock(self, process, tid, locks, timed):
        """Its holder is known if it tells, or if it stands in a `with` block of the same object."""
        if timed:
            return f"`{locks[0][0]}`, with a time limit", "outside", []
        for text, kind, number, owner in locks:
            for other, thread in process["threads"].items():
                held = next((one for one in thread.get("holds", ()) if one[2] == number), None)
                inside = held and kind in LOCKS and owner is None and (other != tid or kind == "lock")
                if other == owner or inside:
                    since = f" since {os.path.basename(held[4])}:{held[5]}" if held else ""
                    who = title(thread) + (" itself" if other == tid else "")
                    return f"`{text}`, which its {who} holds{since}", "lock", [[self.key(process, other)]]
        return f"`{locks[0][0]}`, whose holder cannot be known", "outside", []

    # ------------------------------------------------------------------------------------------------ what it means

    def reduce(self):
        """Return the keys of all nodes that are alive."""
        alive, before = set(), None
        while alive != before:
            before = alive
            able = [key for key, node in self.nodes.items() if all(alive.intersection(one) for one in node.needs)]
            alive = alive.union(able)
        return alive

    def following(self, key):
        """Return {the nodes for which this one waits: whether it must be this one}."""
        found, lives = {}, key in self.alive
        for group in self.nodes[key].needs:
            if lives or not self.alive.intersection(group):
                found |= {one: len(group) == 1 for one in group if one[1] != "callers" and (one in self.alive) == lives}
        return (
            found if not lives or any(found.values()) or len(found) == 1 else {}
        )  # one of many: it is not known which

    def circle(self):
        """Return the shortest circle of nodes that cannot go on; one of its steps at least leaves no choice."""
        best = []
        for start in self.nodes.keys() - self.alive:
            paths, seen = collections.deque([[start]]), set()
            while paths and not (best and len(paths[0]) >= len(best)):
                path = paths.popleft()
                for other, must in self.following(path[-1]).items():
                    if other == start and (must or any(self.following(a)[b] for a, b in itertools.pairwise(path))):
                        best = path
                    elif other not in seen and other != start:
                        seen.add(other)
                        paths.append([*path, other])
        first = min(best, key=lambda key: (self.nodes[key].thread != "main thread", key[0]), default=None)
        return best[best.index(first) :] + best[: best.index(first)] if best else []

    def ends(self):
        """Return the nodes at the ends of the chains: those for which the most others wait come first."""
        counts = collections.Counter()
        for start in self.waiting():
            keys = [start]
            for key in keys:  # which grows
                following = self.following(key)
                keys += [other for other in following if other not in keys]
                counts[key] += not following
        order = sorted(+counts, key=lambda key: (key in self.alive, self.nodes[key].kind == "event", -counts[key]))
        return [key for key in order if (key in self.alive) == (order[0] in self.alive)][:3]

    def waiting(self):
        """Return the keys of the threads that wait for others, the longest first."""
        found = [key for key, node in self.nodes.items() if node.thread and node.needs and node.place[0]]
        return sorted(found, key=lambda key: self.nodes[key].since)

    def verdict(self):
        """Return what is printed, as a dict for --json."""
        circle = self.circle()
        steps = [self.nodes[key] for key in circle or self.ends() if key[1] != "call"]
        kinds = {node.kind for node in steps}
        waits = [self.nodes[key] for key in self.waiting() if key not in circle and self.nodes[key].seconds >= 1]
        what, page = next((about for kind, about in PATTERNS.items() if kind in kinds), PATTERNS["runs"])
        return {
            "verdict": "circle" if circle else "end" if waits else "nothing",
            "steps": [vars(node) for node in steps if circle or waits],
            "waits": [vars(node) for node in waits],
            "pattern": what,
            "page": f"docs/{page}",
            "seconds": min((self.nodes[key].seconds for key in circle if self.nodes[key].thread), default=0.0),
        }


def take_apart(process):
    """Sort the open bars of a process by what they mean."""
    bars = [bar for bar in process["open"] if bar["cat"] != "step" and (bar["cat"] != "wait" or bar["known"])]
    process["file"] = f"{process['host']}-{process['pid']}"
    threads = process["threads"] = {int(tid): thread for tid, thread in process["threads"].items()}
    process["calls"] = [bar for bar in bars if bar["cat"] in ("async", "remote")]
    process["held"] = [bar for bar in bars if bar["cat"] == "held"]
    process["does"] = {bar["name"] for bar in bars if bar["cat"] in ("group", "work")}
    starting = [bar["args"]["worker"] for bar in bars if bar["name"] == "init_rpc"]
    process["name"] = process.get("worker") or (starting or [f"process {process['pid']}"])[0]
    process["rpc"] = bool("worker" in process or starting)
    process["full"] = process.get("pool", [1, 1])[1] == 0
    for tid, thread in threads.items():
        mine = [bar for bar in bars if bar["tid"] == tid and bar["cat"] not in ("async", "remote", "held")]
        thread["bars"] = sorted(mine, key=lambda bar: bar["ts"])
        thread["runs"] = {bar["args"]["call"]: bar["name"] for bar in thread["bars"] if bar["cat"] == "run"}
        thread["main"] = tid == process["main"]
    process["of_torch"] = [tid for tid, thread in threads.items() if is_of_torch(thread)]
    return process


def is_of_torch(thread):
    """Return whether torch has started this thread: it serves a call, or runs a callback or a hook."""
    return bool(thread["runs"]) or ((thread["name"] or "Dummy").startswith("Dummy") and not thread["main"])


def hooks(process):
    """Return the threads that run a part of a backward pass in Python: neither calls, nor callbacks of RPC."""
    serving = sum(bool(thread["runs"]) for thread in process["threads"].values())
    size, free = process.get("pool", (0, 0))
    threads = [(tid, process["threads"][tid]) for tid in process["of_torch"]]
    idle = [(tid, one) for tid, one in threads if not one["runs"]]
    return [
        tid for tid, one in idle if size - free <= serving or any("/torch/autograd/" in f[0] for f in one["frames"])
    ]


def title(thread):
    if thread["main"]:
        return "main thread"
    if thread["runs"]:
        return f"RPC thread that runs {list(thread['runs'].values())[-1]}"
    return "thread of torch" if is_of_torch(thread) else f"thread {thread['name']}"


def own(thread):
    """Return the innermost line of the program itself."""
    return next((frame for frame in thread["frames"] if not frame[4]["library"]), ["", 0, "", "", {}])


def names_of(processes):
    return ", ".join(one["name"] for one in processes)


def load(folder, pattern):
    """Return what the files of this pattern contain. One that is being written is left out."""
    found = []
    for path in sorted(pathlib.Path(folder).rglob(pattern)):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_text()))
    return found


def lines_of(said):
    """Return the report as lines."""
    if said["verdict"] == "nothing":
        return ["No thread waits for another one."]
    groups = collections.defaultdict(list)
    for node in said["waits"]:
        groups[node["thread"], node["what"], tuple(node["place"])].append(node)
    lines = ["WHO WAITS FOR WHOM"] if groups else []
    for nodes in list(groups.values())[:12]:
        lines += of_step(nodes, "  ")
    if len(groups) > 12:
        lines.append(f"  and {len(groups) - 12} more")
    if said["verdict"] == "circle":
        lines.append("CIRCLE: none of these can go on before the next one does, and the last one waits for the first.")
    else:
        lines.append("END OF A CHAIN: for this the others wait.")
    for number, node in enumerate(said["steps"], 1):
        lines += of_step([node], f"  {number}. " if len(said["steps"]) > 1 else "  ")
    return [
        *lines,
        f"{'This is' if said['verdict'] == 'circle' else 'Probably'}: {said['pattern']}. See {said['page']}",
    ]


def of_step(nodes, indent):
    """Return the lines of a node, or of several that wait for the same at the same place."""
    first, seconds = nodes[0], max(node["seconds"] for node in nodes)
    workers = ", ".join(dict.fromkeys(node["worker"] for node in nodes))
    who = f"{workers}'s {first['thread']}" if first["thread"] else workers
    has = "has"
    if len(nodes) > 1:
        who, has = f"{len(nodes)} threads ({workers}: {first['thread']})", "have"
    waits = first["thread"] and first["kind"] != "runs"
    line = (
        f"{indent}{who} {has} waited {seconds:.0f} s for {first['what']}"
        if waits
        else f"{indent}{who}: {first['what']}"
    )
    file, number, function, text = first["place"] or ("", 0, "", "")
    place = f"{' ' * len(indent)}    {os.path.basename(file)}:{number}, in {function}: {text}"
    return [line, place] if file else [line]


def explain(folder, as_json=False, since=0):
    """Return the report on a folder as text, and its verdict."""
    said = Run(folder, since).verdict()
    return json.dumps(said, indent=1) if as_json else "\n".join(lines_of(said)), said


def is_stalled(folder, seconds, since):
    """Return whether nothing has moved for so long although threads wait, or a circle is so old."""
    run = Run(folder, since)
    if not run.processes:
        return False
    ended = [note["gone"] for note in run.notes.values() if "gone" in note]
    moved = max([process["moved"] for process in run.processes] + ended)  # that a process ends moves something, too
    said = run.verdict()
    quiet = time.time_ns() - moved > seconds * 1e9 and said["verdict"] != "nothing"
    return quiet or (said["verdict"] == "circle" and said["seconds"] >= seconds)
