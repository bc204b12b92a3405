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
import itertools
import json
import os
import pathlib

import read

SILENT = 5.0  # seconds without a sign of life, after which a process does not let Python run
SHORT = 30.0  # a call with a shorter time limit counts as a wait with a time limit: it goes on by itself
ANY = "a collective"
NOBODY = "tqdm/_monitor.py"  # the file of a thread that wakes nobody
BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list")
CIRCLE = "CIRCLE: each of these waits for the next one, and the last one for the first."
HANGS, THREADS = "TROUBLESHOOTING.md#my-program-hangs-what-now", "CONCEPTS.md#threads-and-what-may-wait"
BACKWARD = "TROUBLESHOOTING.md#dist_autogradbackward-does-not-return"
COLLECTIVE = "TROUBLESHOOTING.md#an-rpc-and-a-collective-wait-for-each-other"
PATTERNS = {  # what it is, and the page that explains it; the more telling ones come first
    "pool": ("all RPC threads of a process are busy", "TROUBLESHOOTING.md#a-call-does-not-even-time-out"),
    "collective": ("a collective waits for its other members", COLLECTIVE),
    "lock": ("a thread waits while it holds a lock that others need", THREADS),
    "gone": ("a process has ended, and others wait for it", "TROUBLESHOOTING.md#shutdown-does-not-return"),
    "silent": ("a process does nothing any more, and others wait for it", HANGS),
    "absent": ("a rank has not come, or was not recorded", "TROUBLESHOOTING.md#the-ranks-do-not-meet"),
    "owed": ("nobody completes a Future that a served function has returned", HANGS),
    "backward": ("a backward pass waits for a gradient", BACKWARD),
    "event": ("nobody sends the signal for which a thread waits", HANGS),
    "call": ("served functions wait for each other", THREADS),
    "busy": ("a thread is busy, and others wait for it", HANGS),
}


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
        recorded = read.arrange(read.read(self.folder, most=10_000))
        if not recorded:
            return
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
        if "gone" in note and silent > 1.5:  # the others went on without it
            return f"{note['how']} {silent:.0f} s ago", True
        if silent <= SILENT:
            return None
        if not note:
            return f"gives no sign of life for {silent:.0f} s: killed, stopped, or its C code keeps the GIL", False
        if note["stopped"]:
            return f"is stopped for {silent:.0f} s, by SIGSTOP or a debugger", False
        return f"does not let Python run for {silent:.0f} s: C code keeps the GIL", False

    # ------------------------------------------------------------------------------------------------------- nodes

    def key(self, process, what, number=0):
        """Return the key of a thread (`what` is its number) or of another node. All of a lost process is one node."""
        return (process["name"], "gone", 0) if process["lost"] else (process["name"], what, number)

    def add(self, key, thread, what, kind, needs, place=("", 0, "", ""), since=0):
        """Add a node. `what` it waits for, or does; `kind`: a key of PATTERNS; `place`: file, line, function, text."""
        if since > self.instant - 1e9:
            needs = []  # it is not certain that this was so at the instant at which all the rest was so
        self.nodes[key] = {"worker": key[0], "thread": thread, "what": what, "kind": kind, "needs": needs}
        self.nodes[key] |= {"place": place, "seconds": max(0.0, (self.now - since) / 1e9) if since else 0.0}
        return key

    def make_nodes(self, process):
        name, threads = process["name"], process["threads"]
        if process["lost"]:
            how, ended = process["lost"]
            place = threads[process["main"]]["place"] if process["main"] in threads else ("", 0, "", "")
            self.add((name, "gone", 0), "", how, "gone" if ended else "silent", [[]] if ended else [], place)
            return
        for tid, thread in threads.items():
            wait, method = thread | thread["wait"], thread["wait"]["kind"]
            bar = thread["bars"][-1] if thread["bars"] else {"cat": "run"}
            during = "during_" + (bar["cat"] if bar["cat"] in ("sync", "run") else bar["name"])
            if hasattr(self, during):
                wait, method = bar, during
            what = getattr(self, method)(process, tid, wait)
            self.add((name, tid, 0), title(thread), *what, thread["place"], wait["ts"])
        for bar in process["calls"]:
            self.add(self.key(process, "call", bar["args"]["call"]), "", *self.call(process, 0, bar), since=bar["ts"])
        for bar in process["held"]:
            what = f"the Future that {bar['name']} has returned, which is not complete"
            self.add((name, "held", bar["args"]["call"]), "", what, "owed", [self.wakers(process, 0)])
        callers = [key for one in self.processes if one["rpc"] for key in self.calling(one)]
        self.add((name, "callers", 0), "", "a call", "call", [callers + self.unrecorded()])

    def calling(self, process):
        """Return the keys of all that may call, or call already, a function of another process."""
        found = [self.key(process, tid) for tid in process["threads"]]
        found += [self.key(process, "call", bar["args"]["call"]) for bar in process["calls"]]
        return found + ([self.absent("a call that was not recorded")] if process["more"] else [])

    def unrecorded(self):
        """Return the key of whoever was not recorded, in a list, or an empty list if there is nobody."""
        worlds = [one.get("world") or 0 for one in self.processes if one["rpc"]]
        missing = not all(worlds) or max(worlds, default=0) > len(worlds)  # 0: others may join at any time
        return [self.absent("a worker that was not recorded")] if missing else []

    def absent(self, who):
        """Return the key of somebody of whom nothing is known, except perhaps that some processes are there."""
        seen = {one["file"] for one in self.processes}
        others = sorted({path.name.rpartition("-")[0] for path in read.recordings(self.folder)} - seen)
        hows = [f"{name.rpartition('-')[2]} {self.notes.get(name, {}).get('how', '')}".strip() for name in others]
        there = f" (these processes have not begun to meet: {', '.join(hows)})" if hows else ""
        return self.add((who, "absent", 0), "", f"nothing is known of it{there}", "absent", [])

    def pool(self, name):
        """Return the key of the RPC threads of a worker: if all are busy, one of them has to end what it does."""
        if name not in self.by_name:
            return self.absent(name)
        process = self.by_name[name]
        key, busy = self.key(process, "pool"), [self.key(process, tid) for tid in process["of_torch"]]
        if process["lost"]:
            return key
        if process["full"]:
            return self.add(key, "", f"all its {len(busy)} RPC threads are busy", "pool", [busy])
        what = "it has a free RPC thread, and runs no Python function for this"
        return self.add(key, "", what, "busy", [])

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

    during_sync = call

    def during_to_here(self, _, tid, bar):
        """The value of an RRef, whose constructor may still run."""
        rref, owner = bar["known"]["rref"], bar["known"]["owner"]
        what, kind, needs = f"the value of an RRef of {owner}", "call", [[self.pool(owner)]]
        if rref in self.makes:
            what, kind, needs = self.call(self.makes[rref][0], tid, self.makes[rref][1])
            what = f"the value of an RRef: {what}"
        return what, kind, [] if 0 < bar["args"]["limit"] < SHORT else needs

    def during_wait(self, process, tid, bar):
        """It is completed by calls, by a call of a method behind an RRef, by C++, or by whoever does it."""
        completes, wait = bar["known"]["future"], process["threads"][tid]["wait"]
        found = [self.call(process, tid, call) for call in process["calls"] if call["begin"] in completes]
        for owner, method in (one for one in completes if isinstance(one, list)):
            names = (method, "torch.rpc._rref_typeof_on_owner")  # torch asks for the class of the object first
            like = [call for call in process["calls"] if call["args"]["to"] == owner and call["name"] in names]
            keys = [self.key(process, "call", call["args"]["call"]) for call in like]
            found += [(self.call(process, tid, call)[0], "call", [keys]) for call in like[:1]]
        if found:  # all of them have to be answered
            what, kind, _ = max(found, key=lambda one: len(one[2]))
            several = f"{len(found)} calls, for example " if len(found) > 1 else ""
            each = [needs for _, _, needs in found]  # if one of them is alive, it may fail, and this with it
            return several + what, kind, list(itertools.chain(*each)) if all(each) else []
        if wait["kind"] == "operator":
            return self.operator(process, tid, wait)
        if not completes and not bar["known"]["of_python"]:
            return "a Future that C++ completes", "busy", []
        return f"a Future that a thread of {process['name']} completes", "event", [self.wakers(process, tid)]

    def operator(self, _, __, wait):
        """A call that C++ makes and serves, without a bar."""
        needs = [] if 0 < wait["limit"] < SHORT else [[self.pool(wait["to"])]]
        return f"{wait['to']}'s answer to {wait['func']}", "call", needs

    def during_backward(self, process, tid, bar):
        """A hook that runs on a thread of torch, and a process without a free RPC thread, stop a backward pass."""
        ranks = bar["args"].get("workers", ())
        others = [one for one in self.processes if one.get("rank") in ranks and one["rpc"]]
        needs = [[self.pool(one["name"])] for one in others if one["full"] or one["lost"]]
        if sum("backward" in one["does"] for one in self.processes) == 1:  # otherwise it is not known whose hook it is
            there = [one for one in (process, *others) if not one["lost"]]
            found = [(one, hook) for one in there for hook in hooks(one) if hook != tid]
            needs += [[self.key(one, hook)] for one, hook in found if one["threads"][hook]["ts"] > bar["ts"]]
        names = ", ".join(one["name"] for one in others) or "nobody else"
        return f"gradients from {names}", "backward", needs

    def during_shutdown(self, process, _, bar):
        if bar["args"].get("limit") or not bar["args"].get("graceful", True) or not process.get("world"):
            return "the end of shutdown", "busy", []
        members = {one["name"]: one for one in self.processes if one["rpc"] and one is not process}
        members |= {key[0]: None for key in self.unrecorded()}
        found = self.meeting("shutdown", members, lambda one: one.get("left") or "shutdown" in one["does"])
        answers = "the end of shutdown: calls are not answered", "call", [[key] for key in self.serves.values()]
        return found if found[2] else answers

    def during_init_rpc(self, _, __, bar):
        """init_rpc or init_process_group."""
        rank, begun = "rank" if bar["name"] == "init_rpc" else "group_rank", {}
        for one in self.processes:
            begun |= {one.get(rank): one}
            begun |= {other["args"].get("rank"): one for other in one["meets"] if other["name"] == bar["name"]}
        members = {f"rank {number}": begun.get(number) for number in range(bar["args"].get("world") or 0)}
        return self.meeting(f"{bar['name']} of {len(members)} ranks", members, lambda one: True)

    during_init_process_group = during_init_rpc

    def work(self, _, __, ___):
        """Work.wait tells neither its group, nor whether it is a message between two."""
        return "the end of a collective, or of a message", "busy", []

    def engine(self, process, _, __):
        """C++, in which DDP averages gradients during a backward pass, does not tell its group."""
        found = [self.collective(process, 0, {"name": ANY, "group": group}) for group in process.get("members", ())]
        return next((one for one in found if one[2]), (ANY, "busy", []))

    def collective(self, process, _, wait):
        name, group = wait["name"], wait["group"]
        if name in BETWEEN_TWO or group not in process.get("members", ()):
            return f"{name}: the other side", "busy", []
        ranks, count = process["members"][group], process["counts"][group]
        by_rank = {one.get("group_rank"): one for one in self.processes}
        members = {by_rank[rank]["name"] if rank in by_rank else f"rank {rank}": by_rank.get(rank) for rank in ranks}

        def has_begun(other):  # the same one, at the same place in the order of this group
            waits = [thread["wait"] for thread in other["threads"].values() if thread["wait"].get("group") == group]
            same = not waits or name == ANY or name in [one["name"] for one in waits]
            begun = other.get("counts", {}).get(group, -1)
            return begun > count or (begun == count and same)

        return self.meeting(f"{name} of ranks {', '.join(map(str, ranks))}", members, has_begun, served=True)

    def meeting(self, what, members, has_come, served=False):
        """Everybody has to come. `members`: {who: its process, or None if nothing is known of it}.

        `served`: a function that is served may make that call, too. Otherwise only threads do that are not torch's.
        """
        missing, needs = [], []
        for who, one in members.items():
            if one and (one.get("left") or not one["lost"]) and has_come(one):
                continue
            missing.append(who)
            able = [self.absent(who)]
            if one:
                able = [self.key(one, tid) for tid in one["threads"] if served or tid not in one["of_torch"]]
                able += [self.key(one, "callers")] if served and one["rpc"] else []
            needs.append(able)
        what = f"{', '.join(missing)} to begin {what}" if missing else f"the end of {what}, which all have begun"
        return what, "collective", needs

    # And these return it for a thread of which only the lines are known.

    def other(self, _, __, wait):
        return wait["what"], "busy", []

    def signal(self, process, tid, wait):
        """A thread waits in threading.py or queue.py."""
        if wait["again"]:  # it has the signal, and needs the lock again
            return self.lock(process, tid, {"locks": [["its Condition", *wait["lock"]]], "timed": False})
        if wait["timed"]:
            return f"a signal ({wait['type']}), with a time limit", "busy", []
        joins = wait["joins"]
        if joins in process["threads"]:
            return f"the end of {title(process['threads'][joins])}", "call", [[self.key(process, joins)]]
        text = f"a signal of another thread of {process['name']} ({wait['type']})"
        return text, "event", [self.wakers(process, tid)]

    def wakers(self, process, tid):
        """Whoever may complete a Future, or notify, in this process: its threads, its calls, and who calls it."""
        ends = [bar["tid"] for bar in process["meets"] if bar["name"] == "shutdown"]
        found = [key for key in self.calling(process) if key[1] not in (tid, *ends)]
        return found + ([self.key(process, "callers")] if process["rpc"] and not process["full"] else [])

    def lock(self, process, tid, wait):
        """Its holder is known if it tells, or if it stands in a `with` block of the same object."""
        if wait["timed"]:
            return f"`{wait['locks'][0][0]}`, with a time limit", "busy", []
        locks = [one for one in wait["locks"] if one[3] != tid]  # its own it may enter again
        if not locks:
            return "it runs, or waits for something outside", "busy", []
        for text, kind, number, owner in locks:
            for other, thread in process["threads"].items():
                held = next((one for one in thread["holds"] if one[2] == number), None)
                if other == owner or (held and owner is None and (other != tid or kind == "lock")):
                    since = f" since {os.path.basename(held[4])}:{held[5]}" if held else ""
                    who = title(thread) + (" itself" if other == tid else "")
                    return f"`{text}`, which its {who} holds{since}", "lock", [[self.key(process, other)]]
        return f"`{text}`, whose holder cannot be known", "busy", []

    # ------------------------------------------------------------------------------------------------ what it means

    def reduce(self):
        """Return the keys of all nodes that are alive."""
        alive, before = set(), None
        while alive != before:
            before = alive
            able = [key for key, node in self.nodes.items() if all(alive.intersection(one) for one in node["needs"])]
            alive = alive.union(able)
        return alive

    def following(self, key):
        """Return {the nodes for which this one waits: whether it must be this one}."""
        found, lives = {}, key in self.alive
        for group in self.nodes[key]["needs"]:
            if lives or not self.alive.intersection(group):
                known = [one for one in group if one[1] != "callers"]
                must = len(known if self.nodes[key]["kind"] == "collective" else group) == 1
                found |= {one: must for one in known if (one in self.alive) == lives}
        one_of_many = lives and len(found) > 1 and not any(found.values())
        return {} if one_of_many else found  # it is not known for which of them

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
        first = min(best, key=lambda key: (self.nodes[key]["thread"] != "main thread", key[0]), default=None)
        return best[best.index(first) :] + best[: best.index(first)] if best else []

    def ends(self):
        """Return the nodes at the ends of the chains: those for which the most others wait come first."""
        counts = collections.Counter()
        for start in self.waiting():
            keys = [start]
            for key in keys:  # which grows
                following = self.following(key)
                keys += [other for other in following if other not in keys]
                # It is also an end if several might let it go on, but none of them must.
                counts[key] += not (following if key in self.alive else any(following.values()))
        order = sorted(+counts, key=lambda key: (key in self.alive, self.nodes[key]["kind"] == "event", -counts[key]))
        return [key for key in order if (key in self.alive) == (order[0] in self.alive)][:3]

    def waiting(self):
        """Return the keys of the threads that wait for others, the longest first."""
        found = [key for key, node in self.nodes.items() if node["thread"] and node["needs"] and node["place"][0]]
        return sorted(found, key=lambda key: -self.nodes[key]["seconds"])

    def verdict(self):
        """Return what is found, as a dict for --json. Its "report" is what is printed."""
        circle = self.circle()
        waits = [self.nodes[key] for key in self.waiting() if key not in circle and self.nodes[key]["seconds"] >= 1]
        steps = [self.nodes[key] for key in circle or self.ends() if key[1] != "call"] if circle or waits else []
        kinds = {node["kind"] for node in steps}
        what, page = next((about for kind, about in PATTERNS.items() if kind in kinds), PATTERNS["busy"])
        said = {"verdict": "circle" if circle else "end" if waits else "nothing", "steps": steps, "waits": waits}
        said |= {"pattern": what, "page": f"docs/{page}"}
        said["sure"] = bool(circle) and kinds.isdisjoint({"backward", "event", "owed"})
        said["main"] = [node for node in self.nodes.values() if node["thread"] == "main thread"]
        said["seconds"] = min((node["seconds"] for node in steps if node["thread"]), default=0.0)  # of the youngest
        ended = [note["gone"] for note in self.notes.values() if "gone" in note]  # this moves something, too
        said["moved"] = max([process["moved"] for process in self.processes] + ended, default=0)
        return said | {"report": "\n".join(lines_of(said))}


def take_apart(process):
    """Sort the open bars of a process by what they mean."""
    bars = [bar for bar in process["open"] if bar["cat"] != "step" and (bar["cat"] != "wait" or bar["known"])]
    process["file"] = f"{process['host']}-{process['pid']}"
    threads = {int(tid): one for tid, one in process["threads"].items() if not one["place"][0].endswith(NOBODY)}
    process["threads"] = threads
    process["calls"] = [bar for bar in bars if bar["cat"] in ("async", "remote")]
    process["held"] = [bar for bar in bars if bar["cat"] == "held"]
    process["meets"] = [bar for bar in bars if bar["cat"] == "group"]
    process["does"] = {bar["name"] for bar in bars if bar["cat"] in ("group", "work")}
    process["more"] += max(0, process.get("unseen", 0))
    starting = [bar["args"]["worker"] for bar in process["meets"] if bar["name"] == "init_rpc"]
    process["name"] = process.get("worker") or (starting or [f"process {process['pid']}"])[0]
    process["rpc"] = bool("worker" in process or starting)
    for tid, thread in threads.items():
        mine = [bar for bar in bars if bar["tid"] == tid and bar["cat"] not in ("async", "remote", "held")]
        thread["bars"] = sorted(mine, key=lambda bar: bar["ts"])
        thread["runs"] = {bar["args"]["call"]: bar["name"] for bar in thread["bars"] if bar["cat"] == "run"}
        thread["main"] = tid == process["main"]
    process["of_torch"] = [tid for tid, thread in threads.items() if is_of_torch(thread)]
    size, free = process.get("pool", (1, 1))
    process["full"] = free == 0 and len(process["of_torch"]) >= size  # the others only handle messages, for a moment
    return process


def is_of_torch(thread):
    """Return whether torch has started this thread: it serves a call, or runs a callback or a hook."""
    return bool(thread["runs"]) or ((thread["name"] or "Dummy").startswith("Dummy") and not thread["main"])


def hooks(process):
    """Return the threads that run a part of a backward pass in Python: neither calls, nor callbacks of RPC."""
    threads, (size, free) = process["threads"], process.get("pool", (0, 0))
    serving = sum(bool(thread["runs"]) for thread in threads.values())
    idle = [tid for tid in process["of_torch"] if not threads[tid]["runs"]]
    return [tid for tid in idle if size - free <= serving or threads[tid]["autograd"]]


def title(thread):
    if thread["main"]:
        return "main thread"
    if thread["runs"]:
        return f"RPC thread that runs {list(thread['runs'].values())[-1]}"
    return "thread of torch" if is_of_torch(thread) else f"thread {thread['name']}"


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
        lines = ["No thread waits for another one, as far as is known."]
        return lines + [line for nodes in alike(said["main"])[:12] for line in of_nodes(nodes, "  ")]
    groups = alike(said["waits"])
    lines = ["WHO WAITS FOR WHOM"] if groups else []
    for nodes in groups[:12]:
        lines += of_nodes(nodes, "  ")
    if len(groups) > 12:
        lines.append(f"  and {len(groups) - 12} more")
    circle = said["verdict"] == "circle"
    lines.append(CIRCLE if circle else "END OF A CHAIN: for this the others wait.")
    steps = [[node] for node in said["steps"]] if circle else alike(said["steps"])
    for number, nodes in enumerate(steps, 1):
        lines += of_nodes(nodes, f"  {number}. " if len(steps) > 1 else "  ")
    return [*lines, f"{'This is' if said['sure'] else 'Probably'}: {said['pattern']}. See {said['page']}"]


def alike(nodes):
    """Return the nodes in groups, each of which waits for the same at the same place."""
    groups = collections.defaultdict(list)
    for node in nodes:
        groups[node["thread"], node["what"], tuple(node["place"])].append(node)
    return list(groups.values())


def of_nodes(nodes, indent):
    """Return the lines of a node, or of several that wait for the same at the same place."""
    thread, what, (file, number, function, text) = (nodes[0][key] for key in ("thread", "what", "place"))
    who, have = ", ".join(dict.fromkeys(node["worker"] for node in nodes)), "has"
    if len(nodes) > 1 and thread:
        who, have = f"{len(nodes)} threads ({who}: {thread})", "have"
    elif thread:
        who += f"'s {thread}"
    waited = f" {have} waited {max(node['seconds'] for node in nodes):.0f} s for "
    lines = [f"{indent}{who}{waited if thread and not what.startswith('it ') else ': '}{what}"]
    if file:
        lines.append(f"{' ' * len(indent)}    {os.path.basename(file)}:{number}, in {function}: {text}")
    return lines
