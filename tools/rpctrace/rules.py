"""The rules: who must go on before a thread can. They turn the evidence into the nodes of the graph."""

import itertools

from rpctrace.evidence import SHORT
from rpctrace.graph import CALL, CALLERS, Graph, Node
from rpctrace.waits import BETWEEN_TWO

UNKNOWN = "nothing is known of it: it has ended, has not begun, or runs elsewhere"


def graph_of(evidence):
    return Graph(Rules(evidence).nodes)


class Rules:
    def __init__(self, evidence):
        self.evidence, self.processes, self.nodes = evidence, evidence.processes, {}
        self.workers = [one for one in self.processes if one.rpc]
        self.by_name = {process.name: process for process in self.processes}
        self.instant = min((one.ts for one in self.processes if not one.lost), default=0)
        self.serves = {}  # number of a recorded call -> key of who serves it
        for process in self.processes:
            for tid, thread in process.threads.items():
                self.serves |= {call.number: self.key(process, tid) for call in thread.serves if call.number}
            for call in process.owed:
                self.serves.setdefault(call.number, self.key(process, "owed", call.number))
        for process in self.processes:
            self.make_nodes(process)

    # ------------------------------------------------------------------------------------------------------- nodes

    def key(self, process, what, number=0):
        """Return the key of a thread (`what` is its number) or of another node. All of a lost process is one node.

        The others are an RPC call (CALL), a Future that is owed ("owed"), the RPC threads ("pool"), whoever may call
        this process (CALLERS), and somebody of whom nothing is known ("absent").
        """
        return (process.name, "gone", 0) if process.lost else (process.name, what, number)

    def add(self, key, what, kind, needs, thread=None, since=0):
        """Add a node, which has waited for `what` since then. `thread`: if it is one."""
        if since > self.instant - 1e9:
            needs = []  # it is not certain that this was so at the instant at which all the rest was so
        seconds = max(0.0, (self.evidence.now - since) / 1e9) if since else 0.0
        node = self.nodes[key] = Node(key[0], thread.title() if thread else "", what, kind, needs, seconds=seconds)
        if thread:
            node.place = thread.place
        return key

    def make_nodes(self, process):
        name = process.name
        if process.lost:
            ended = ("gone", [[]]) if process.ended else ("silent", [])
            self.add((name, "gone", 0), process.lost, *ended)
            if process.main in process.threads:
                self.nodes[name, "gone", 0].place = process.threads[process.main].place
            return
        for tid, thread in process.threads.items():
            what, kind, needs = RULES[thread.wait.kind](self, process, thread)
            self.add((name, tid, 0), what, kind, needs, thread, thread.wait.since)
        for call in process.calls:
            self.add(self.key(process, CALL, call.number), *self.answer(process, call), since=call.since)
        for call in process.owed:
            what = f"the Future that {call.name} has returned, which is not complete"
            self.add((name, "owed", call.number), what, "owed", [self.wakers(process)])
        callers = [key for one in self.workers for key in self.calling(one)]
        self.add((name, CALLERS, 0), "a call", "call", [callers + self.unknown_workers()])

    def calling(self, process):
        """Return the keys of all that may call, or call already, a function of another process."""
        found = [self.key(process, tid) for tid in process.threads]
        found += [self.key(process, CALL, call.number) for call in process.calls]
        return found + ([self.absent("a call that was not recorded")] if process.unseen else [])

    def unknown_workers(self):
        """Return the keys of the workers of which nothing is known, or an empty list if there is none."""
        worlds, ranks = [one.world for one in self.workers], {one.rank for one in self.workers}
        if all(worlds) and max(worlds, default=0) <= len(worlds):
            return []
        if not all(worlds) or -1 in ranks:  # there may be any number of them, or it is not known which
            return [self.absent("another worker")]
        return [self.absent(f"rank {rank}") for rank in range(max(worlds)) if rank not in ranks]

    def absent(self, who):
        """Return the key of somebody of whom nothing is known. He may do anything."""
        return self.add((who, "absent", 0), UNKNOWN, "absent", [])

    def pool(self, name):
        """Return the key of the RPC threads of a worker: if all are busy, one of them has to end what it does."""
        if name not in self.by_name:
            return self.absent(name)
        process = self.by_name[name]
        key, busy = self.key(process, "pool"), [self.key(process, tid) for tid in process.of_torch()]
        if process.lost:
            return key
        if process.full():
            return self.add(key, f"all its {len(busy)} RPC threads are busy", "pool", [busy])
        return self.add(key, "it has a free RPC thread, and runs no Python function for this", "busy", [])

    # Each of these returns (what, kind, needs) of a Node. `needs` is a list of groups of keys, see graph.py: [] if the
    # thread may go on by itself, or if too little is known.

    def answer(self, process, call):
        """A call waits for who serves it, and for an RPC thread that takes the answer."""
        waited = (self.evidence.now - call.since) / 1e9 if call.since else 0.0
        title = f"{call.to}'s answer" if call.to else "an answer"
        title += f" to {call.title()}" if call.name else ""
        kind, needs = "call" if call.to else "guess", self.servers(process, call)
        if process.full():
            title += f"; no RPC thread of {process.name} is free to take it"
            kind, needs = "pool", [*needs, [self.pool(process.name)]] if needs else []
        elif call.limit and waited:
            title += f" (it fails by itself in {max(0, call.limit - waited):.0f} s)"
        return title, kind, [] if 0 < call.limit < SHORT else needs

    def servers(self, process, call):
        """Return what the answer to a call needs, or [] if that is not known."""
        if process.exact:
            return [[self.serves[call.number] if call.number in self.serves else self.pool(call.to)]]
        owners = self.owners(process, call)
        if not owners or (len(owners) == 1 and owners[0].lost):
            return [[self.pool(call.to)]] if call.to else []
        found = self.candidates(process, call)
        return [found] if found else [] if found is None else [[self.pool(one.name) for one in owners]]

    def owners(self, process, call):
        """Return the processes one of which a call is for; those elsewhere come first."""
        if call.to in self.by_name:
            return [self.by_name[call.to]]
        unnamed = [one for one in self.workers if not (call.to and one.named)]
        return sorted(unnamed, key=lambda one: one is process)

    def candidates(self, process, call):
        """Return the keys of all that may serve a call whose number is not known. None: somebody else may do it."""
        owners = self.owners(process, call)
        if not call.name or any(one.lost for one in owners) or not all(one.quiet for one in self.processes):
            return None  # the message may be on its way
        found, owes = [], call.owes or (call.owes is None and any(one.full() for one in owners))
        for one in owners:
            for tid, thread in one.threads.items():
                if served := serves(thread, call):
                    found.append(self.key(one, tid))
                    owes |= served.owes
            found += [self.pool(one.name)] if one.full() else []  # or it waits until one of them is free
        if owes:  # who completes the Future, or may have to, is not on any stack
            what = f"the Future that {call.name} has returned, which is not complete"
            found.append(self.add((call.to or "a worker", "owed", call.name), what, "owed", []))
        return found + (self.unknown_workers() if found and len(owners) > 1 else [])

    def answers(self, process, thread):
        """A Future is completed by calls, by C++, or by whoever does it."""
        wait, found = thread.wait, []
        for calls in wait.answers:
            if not process.exact:  # of several, those of functions of this file that nobody serves have been answered
                calls = [call for call in calls if call.owes is None or self.candidates(process, call)] or calls
            what, kind, needs = self.answer(process, calls[0])
            if len(calls) > 1:  # one of them is the one
                nodes = [self.key(process, CALL, call.number or f"{call.to} {call.name}") for call in calls]
                for node, call in zip(nodes, calls, strict=True):
                    self.add(node, *self.answer(process, call), since=call.since)
                needs = [nodes]
            found.append((what, kind, needs))
        if found:  # all of them have to be answered
            what, kind, _ = max(found, key=lambda one: len(one[2]))
            several = f"{len(found)} calls, for example " if len(found) > 1 else ""
            each = [needs for _, _, needs in found]  # if one of them is alive, it may fail, and this with it
            return several + what, kind, list(itertools.chain(*each)) if all(each) else []
        if wait.made_by == "a thread":
            return f"a Future that a thread of {process.name} completes", "event", [self.wakers(process, thread.tid)]
        return "a Future that C++ completes" if wait.made_by == "C++" else "a Future: whose is not known", "busy", []

    def value(self, process, thread):
        """The value of an RRef, whose constructor may still run."""
        if not process.exact:
            what, kind, needs = self.answers(process, thread)
            return f"the value of an RRef: {what}", kind, needs
        call = thread.wait.answers[0][0]
        what, kind, needs = f"the value of an RRef of {call.to}", "call", [[self.pool(call.to)]]
        for one in self.processes:
            for made in one.calls:
                if call.rref and made.rref == call.rref:
                    what, kind, needs = self.answer(one, made)
                    what = f"the value of an RRef: {what}"
        return what, kind, [] if 0 < call.limit < SHORT else needs

    def backward(self, process, thread):
        """A hook that runs on a thread of torch, and a process without a free RPC thread, stop a backward pass."""
        ranks = thread.wait.workers
        others = [one for one in self.workers if (one.rank in ranks if process.exact else one is not process)]
        needs = [[self.pool(one.name)] for one in others if one.full() or one.lost]
        if sum(one.does("backward") for one in self.processes) == 1:  # otherwise it is not known whose hook it is
            there = [one for one in (process, *others) if not one.lost]
            found = [(one, hook) for one in there for hook in hooks(one) if hook != thread.tid]
            started = thread.wait.since
            needs += [[self.key(one, hook)] for one, hook in found if one.threads[hook].since >= started]
        names = ", ".join(one.name for one in others) or "nobody else"
        return f"gradients from {names}", "backward", needs if all(one.still for one in self.processes) else []

    def shutdown(self, process, thread):
        wait = thread.wait
        if wait.limit or wait.timed or not process.world:
            return "the end of shutdown", "busy", []
        members = {one.name: one for one in self.workers if one is not process}
        members |= {key[0]: None for key in self.unknown_workers()}
        found = self.meeting("shutdown", members, lambda one: one.left or one.does("shutdown"))
        serving = [[self.key(one, tid)] for one in self.processes for tid, each in one.threads.items() if each.serves]
        owed = [[self.key(one, "owed", call.number)] for one in self.processes for call in one.owed]
        return found if found[2] else ("the end of shutdown: calls are not answered", "call", serving + owed)

    def init(self, process, thread):
        """init_rpc or init_process_group. A rank that has not come is one of the processes that are not there yet."""
        name, begun, come = thread.wait.what, {}, []
        for one in self.processes:
            ranks = {one.rank if one.rpc else -1} if name == "init_rpc" else {one.group_rank}
            ranks |= {each.does[name] for each in one.threads.values() if name in each.does}
            begun |= dict.fromkeys(ranks - {-1}, one)
            come += [one] * (ranks != {-1} or one.does(name))
        members = {f"rank {number}": begun.get(number) for number in range(thread.wait.world)}
        there = self.workers if len(self.workers) >= len(members) else self.processes
        others = [one for one in there if one not in come] if len(there) >= len(members) else []
        return self.meeting(f"{name} of {len(members)} ranks", members, lambda one: True, others=others)

    def collective(self, process, thread):
        """All members have to begin the same one, at the same place in the order of this group."""
        name, group = thread.wait.what, thread.wait.group
        if name in BETWEEN_TWO or group not in process.members:
            return f"{name}: the other side", "busy", []
        ranks, count = process.members[group], process.counts.get(group, -1)
        by_rank = {one.group_rank: one for one in self.processes}
        members = {by_rank[rank].name if rank in by_rank else f"rank {rank}": by_rank.get(rank) for rank in ranks}

        def has_begun(other):
            waits = [each.wait for each in other.threads.values() if each.wait.kind == "collective"]
            names = [wait.what for wait in waits if wait.group == group]
            begun = other.counts.get(group, -1)
            return begun > count or (begun == count and (not names or name in names))

        return self.meeting(f"{name} of ranks {', '.join(map(str, ranks))}", members, has_begun, served=True)

    def meeting(self, what, members, has_come, served=False, others=()):
        """Everybody has to come. `members`: {who: its process, or None if nothing is known of it}.

        `served`: a function that is served may make that call, too. Otherwise only threads do that are not torch's.
        `others`: processes one of which each unknown member is.
        """
        missing, needs = [], []
        for who, one in members.items():
            if one and (one.left or not one.lost) and has_come(one):
                continue
            missing.append(who)
            able = []
            for process in [one] if one else others:
                able += [self.key(process, tid) for tid in process.threads if served or tid not in process.of_torch()]
                able += [self.key(process, "gone")] if process.lost else []
                able += [self.key(process, CALLERS)] if served and process.rpc and not process.lost else []
            needs.append(able or [self.absent(who)])
        what = f"{', '.join(missing)} to begin {what}" if missing else f"the end of {what}, which all have begun"
        return what, "collective", needs

    def other(self, process, thread):
        return thread.wait.what, "busy", []

    def signal(self, process, thread):
        """A thread waits in threading.py or queue.py."""
        wait = thread.wait
        if wait.again:  # it has the signal, and needs the lock again
            return self.lock(process, thread)
        if wait.timed:
            return f"a signal ({wait.what}), with a time limit", "busy", []
        if wait.joins in process.threads:
            return f"the end of {process.threads[wait.joins].title()}", "call", [[self.key(process, wait.joins)]]
        text = f"a signal of another thread of {process.name} ({wait.what})"
        still = all(one.still for one in self.processes)  # or an answer, which a dump does not show, may send it
        return text, "event", [self.wakers(process, thread.tid)] if still else []

    def wakers(self, process, tid=0):
        """Whoever may complete a Future, or notify, in this process: its threads, its calls, and who calls it."""
        ends = [tid, *(other for other, thread in process.threads.items() if "shutdown" in thread.does)]
        found = [key for key in self.calling(process) if key[1] not in ends]
        return found + ([self.key(process, CALLERS)] if process.rpc and not process.full() else [])

    def lock(self, process, thread):
        """Its holder is known if it tells, or if it stands in a `with` block of the same object."""
        tid, wait = thread.tid, thread.wait
        if wait.timed:
            return f"`{wait.locks[0].text}`, with a time limit", "busy", []
        locks = [lock for lock in wait.locks if lock.owner != tid]  # its own it may enter again
        if not locks:
            return "it runs, or waits for something outside", "busy", []
        for lock in locks:
            text = "its Condition" if wait.again else lock.text
            for other, holder in process.threads.items():
                held = next((one for one in holder.holds if one.id == lock.id and lock.id), None)
                if other == lock.owner or (held and lock.owner is None and (other != tid or lock.type == "lock")):
                    since = f" since {held.place}" if held else ""
                    who = holder.title() + (" itself" if other == tid else "")
                    return f"`{text}`, which its {who} holds{since}", "lock", [[self.key(process, other)]]
        return f"`{locks[0].text}`, whose holder cannot be known", "busy", []


RULES = {  # by the kind of a wait
    "answer": Rules.answers,
    "rref": Rules.value,
    "backward": Rules.backward,
    "shutdown": Rules.shutdown,
    "init": Rules.init,
    "collective": Rules.collective,
    "signal": Rules.signal,
    "lock": Rules.lock,
    "other": Rules.other,
}


def serves(thread, call):
    """Return what a thread serves that may be this call, whose number is not known, or None."""
    for served in thread.serves:
        named = served.name == call.name or served.name.endswith(f".{call.name}")
        if named and (not call.inner or call.inner == served.inner):
            return served
    return None


def hooks(process):
    """Return the threads that run a part of a backward pass in Python: neither calls, nor callbacks of RPC."""
    threads, serving = process.threads, sum(bool(thread.serves) for thread in process.threads.values())
    idle = [tid for tid in process.of_torch() if not threads[tid].serves]
    return [tid for tid in idle if process.pool - process.free <= serving or threads[tid].autograd]
