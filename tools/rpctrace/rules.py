"""The rules: who must go on before a thread can. They turn the evidence into the nodes of the graph.

A key of a node is (name, what, which). `name` is that of a process, or words such as "rank 2". `what` says what the
node stands for, and `which` tells several of these apart:

    number of a thread, 0   a thread
    CALL, str(call)         a call that is not answered
    "owed", function        a Future that a served function has returned
    "pool", 0               the RPC threads of a process
    "gone", 0               all of a process that is lost
    "callers", 0            whoever may call a function
    "absent", 0             somebody of whom nothing is known, and who may do anything

A rule is a method of Rules for one kind of evidence.Wait (RULES, at the end of this file). It returns the text for the
report, the kind of the node (a key of report.PATTERNS, or "guess"), and the needs (graph.Need). It gives no needs if
the thread may go on by itself, or if too little is known: then nobody is said to wait for it in a circle. Need.anyone
contains everybody who may help, or a circle might be claimed that is none; Need.shown the likely ones.

evidence.py explains what is known of a process (`quiet`, `still`, `unseen`, `full()`) and of a call (`owes`, `inner`).
"""

from rpctrace.evidence import Frame
from rpctrace.graph import CALL, Graph, Need, Node
from rpctrace.waits import OF_ALL

UNKNOWN = "nothing is known of it: it has ended, has not begun, or runs elsewhere"
CALLERS = ("another worker", "callers", 0)


def graph_of(processes):
    return Graph(Rules(processes).nodes)


class Rules:
    """Makes all nodes. The methods under "threads" are the rules."""

    def __init__(self, processes):
        self.processes, self.nodes = processes, {}
        self.workers = [one for one in processes if one.rpc]
        self.by_name = {process.name: process for process in processes}
        self.still = all(one.still for one in processes)
        self.strangers = self.unknown_workers()
        for process in processes:
            self.make_nodes(process)
        everybody = [self.key(one, tid) for one in self.workers for tid in one.threads]
        self.add(CALLERS, "a call", "call", [Need(everybody + self.strangers)])

    # ------------------------------------------------------------------------------------------------------- nodes

    def key(self, process, what, which=0):
        return (process.name, "gone", 0) if process.lost else (process.name, what, which)

    def add(self, key, text, kind, needs, thread=None):
        """Add a node; return its key. `thread`: if it is one."""
        title, place = (thread.title(), thread.place) if thread else ("", Frame())
        self.nodes[key] = Node(key[0], title, text, kind, needs, place)
        return key

    def make_nodes(self, process):
        if process.lost:
            # A need without anyone is never met. Without needs it may go on.
            ended = ("gone", [Need([])]) if process.ended else ("silent", [])
            self.add(self.key(process, "gone"), process.lost, *ended)
        for tid, thread in process.threads.items():
            self.add(self.key(process, tid), *RULES[thread.wait.kind](self, process, thread), thread)

    def unknown_workers(self):
        """Add the workers of which nothing is known; return their keys, or an empty list if there is none."""
        worlds, ranks = {one.world for one in self.workers}, [one.rank for one in self.workers]
        world, known = max(worlds, default=0), [rank for rank in ranks if rank >= 0]
        # Two sizes, one rank twice, or more workers than the size: then anybody may be missing.
        of_two_jobs = len(worlds) > 1 or len(set(known)) < len(known) or len(ranks) > world
        some_miss = len(known) < len(ranks) < world  # and it is not known which
        if 0 in worlds or of_two_jobs or some_miss:
            return [self.absent("another worker")]
        return [self.absent(f"rank {rank}") for rank in range(world) if rank not in known] if len(ranks) < world else []

    def absent(self, who):
        return self.add((who, "absent", 0), UNKNOWN, "absent", [])

    def pool(self, process):
        """Add the RPC threads of a worker; return their key. If all are busy, one has to end what it does."""
        key, busy = self.key(process, "pool"), [self.key(process, tid) for tid in process.threads_of_torch()]
        if process.full():
            return self.add(key, f"all its {len(busy)} RPC threads are busy", "pool", [Need(busy)])
        return self.add(key, "it has a free RPC thread, and runs no Python function for this", "unknown", [])

    # ------------------------------------------------------------------------------------------------------- calls

    def call(self, process, call):
        """Add a call, and return its key: it waits for who serves it, and for an RPC thread that takes the answer."""
        title = f"{call.to}'s answer" if call.to else "an answer"
        title += f" to {call.name}" if call.name else ""
        needs = [] if call.goes_on() else self.servers(process, call)
        if process.full():
            title += f"; no RPC thread of {process.name} is free to take it"
        if not needs:  # it goes on by itself, or too little is known
            kind = "busy" if call.goes_on() else "unknown"
        elif process.full():
            kind, needs = "pool", [*needs, Need([self.pool(process)])]
        else:
            kind = "call" if call.to and not any(need.has_others() for need in needs) else "guess"
        key = self.add(self.key(process, CALL, str(call)), title, kind, needs)
        self.nodes[key].limit = call.limit or 0.0
        return key

    def servers(self, process, call):
        """Return what the answer to a call of this process needs, [] if that is not known.

        In this order: the callee is not here, or is lost; it is not certain that the call has arrived; its function
        answers by a Future; otherwise a thread serves it, or it waits for a free RPC thread (`able`). `others` might
        bring the answer, too, although no stack shows that they will.
        """
        owners = self.owners_of(call)
        if not owners:
            return [Need([self.absent(call.to)])] if call.to else []
        if len(owners) == 1 and owners[0].lost:
            return [Need([self.key(owners[0], "gone")])]
        if not call.name or not all(one.quiet and not one.lost for one in self.processes):
            return []  # its message may be on its way, or be served by somebody who is lost
        threads = [(self.key(one, tid), thread) for one in owners for tid, thread in one.threads.items()]
        serving = {key: served for key, thread in threads for served in thread.serves if served.name == call.name}
        if any(served.owner and call.owner and served.owner != call.owner for served in serving.values()):
            return []  # A.get and B.get: they may be two functions
        if call.owes or any(served.owes for served in serving.values()):  # whoever completes it is not on any stack
            what = f"the Future that {call.name} has returned, which is not complete"
            return [Need([self.add((call.to or "a worker", "owed", call.name), what, "owed", [])])]
        if call.owes is None and not serving:
            return []  # it may have returned a Future
        # As no message is on its way, a thread serves the call, or it waits for one in a pool that is full.
        unnamed = [key for key, thread in threads if any(served.name is None for served in thread.serves)]
        able = [*(serving or unnamed)]
        able += [self.pool(one) for one in owners if one.full() or not able]
        others = [] if call.to in self.by_name else [*self.strangers]
        # A thread of torch that is between two calls: at the callee it may read the call; in this process, the answer.
        for one in self.workers:
            if one is process or one in owners:
                others += [self.key(one, tid) for tid in one.threads_of_torch() if one.threads[tid].prepares()]
        # Likely is: not the caller's own process; among these, one whose `inner` the caller's source mentions, as in
        # call_method(Agent.act, ...).
        shown = [key for key in serving if key[0] != process.name] or able
        shown = [key for key in shown if key in serving and serving[key].inner in call.mentions] or shown
        return [Need([*able, *others], shown)]

    def owners_of(self, call):
        """Return the workers that a call may be for: the one of this name, or all that may have it."""
        if call.to in self.by_name:
            return [self.by_name[call.to]]
        return [one for one in self.workers if not (call.to and one.named)]

    # ------------------------------------------------------------------------------------------------------- threads

    def answer(self, process, thread):
        """It waits for one of these calls, each of which is a node. The first one's kind is that of the thread."""
        what, keys = thread.wait.what, [self.call(process, call) for call in thread.wait.calls]
        if not keys:
            return f"{what or 'a Future'}: whose is not known", "unknown", []
        first = self.nodes[keys[0]]
        what = f"{what}: {first.what}" if what else first.what
        return (f"one of {len(keys)} calls, for example " if len(keys) > 1 else "") + what, first.kind, [Need(keys)]

    def shutdown(self, process, thread):
        """All workers have to come, and to end what they serve."""
        if thread.wait.timed or not process.world:
            return "the end of shutdown", "busy", []
        missing = {one.name: [one] for one in self.workers if one is not process and not one.is_within("shutdown")}
        missing |= {key[0]: [] for key in self.strangers}
        if missing:
            return self.meeting("shutdown", missing, "meeting")
        serving = [self.key(one, tid) for one in self.processes for tid, each in one.threads.items() if each.serves]
        return "the end of shutdown: calls are not answered", "call", [Need([key]) for key in serving]

    def init(self, process, thread):
        """init_rpc or init_process_group, by which a process gets its rank in a group. All ranks have to begin it.

        For example, ranks 0 and 1 of 3 are in init_process_group. If w0, w1 and w2 are here, and w2 has not begun it,
        rank 2 is w2. If w2 is not here, nothing is known of rank 2.
        """
        name, world = thread.wait.what, thread.wait.world
        if thread.wait.timed or not world:
            return f"the other ranks, in {name}", "unknown", []
        begun, others = set(), []  # the ranks that have begun it, and the workers that have not
        for one in self.processes:
            ranks = {each.does[name] for each in one.threads.values() if name in each.does}
            if name == "init_rpc" and one.rpc and not one.lost:
                ranks.add(one.rank)
            begun |= ranks
            if one.rpc and not ranks and not one.groups:
                others.append(one)
        if -1 in begun:  # the rank of one is not known
            return f"the other ranks, in {name}", "unknown", []
        # With fewer workers than ranks, a missing rank may be a process that is not known here.
        others = others if len(self.workers) >= world else []
        missing = {f"rank {rank}": others for rank in range(world) if rank not in begun}
        kind = "collective" if name == "init_process_group" else "meeting"
        return self.meeting(f"{name} of {world} ranks", missing, kind)

    def collective(self, process, thread):
        """All members of the group have to begin the same one."""
        name = thread.wait.what
        if thread.wait.timed or process.groups != 1 or not name.startswith(OF_ALL):
            return f"{name}: the other side", "unknown", []  # it is not known which group, or who may be ahead

        def has_begun(other):
            return any((each.wait.kind, each.wait.what) == ("collective", name) for each in other.threads.values())

        missing = {one.name: [one] for one in self.processes if one.groups and not has_begun(one)}
        what, kind, needs = self.meeting(name, missing, "collective", served=True)
        if needs:
            # Of those who are missing, all but one may have begun it by async_op. So only one of them has to come.
            shown = [key for need in needs for key in need.shown]
            # A function that is served may begin it, so whoever calls one may help.
            called = [CALLERS] if any(one.rpc and not one.lost for (one,) in missing.values()) else []
            needs = [Need([*shown, *called, *self.strangers], shown)]
        return what, kind, needs

    def meeting(self, what, missing, kind, served=False):
        """Each of those who are missing has to come. `missing`: {who: the processes one of which it is, or none}.

        `served`: also a thread of torch may come, because a function that is served begins it.
        """
        needs = []
        for who, processes in missing.items():
            able = [self.key(process, "gone") for process in processes if process.lost]
            for process in processes:
                of_torch = process.threads_of_torch()
                able += [self.key(process, tid) for tid in process.threads if served or tid not in of_torch]
            mains = [self.key(one, tid) for one in processes for tid, each in one.threads.items() if each.main]
            able = able or [self.absent(who)]
            needs.append(Need(able, able if served else mains or able))
        end = f"the end of {what}, which all that are seen have begun"
        return f"{', '.join(missing)} to begin {what}" if missing else end, kind, needs

    def signal(self, process, thread):
        """Any other thread of the process may send it, and whoever calls a function.

        A thread in shutdown may do so afterwards, but shutdown ends only when all functions that are served have ended.
        """
        wait, others = thread.wait, [tid for tid in process.threads if tid != thread.tid]
        if wait.timed:
            return f"a signal ({wait.what}), with a time limit", "busy", []
        if wait.joins in process.threads:
            return f"the end of {process.threads[wait.joins].title()}", "call", [Need([self.key(process, wait.joins)])]
        text = f"a signal of another thread of {process.name} ({wait.what})"
        if not self.still or process.unseen:  # an answer, which a dump does not show, may send it, too
            return text, "event", []
        able = [tid for tid in others if not (thread.serves and "shutdown" in process.threads[tid].does)]
        shown = [self.key(process, tid) for tid in able]
        if process.full():  # who calls a function that sends it, waits for a thread that is free
            shown.append(self.pool(process))
        callers = [CALLERS] if process.rpc and not process.full() else []
        return text, "event", [Need([*shown, *callers], shown)]

    def lock(self, process, thread):
        """Its holder is known only if it stands in a `with` block of the same object."""
        tid, wait = thread.tid, thread.wait
        if wait.timed:
            return f"`{wait.locks[0].text}`, with a time limit", "busy", []
        for lock in wait.locks:
            holders = holders_of(lock, process)
            if lock.type != "lock":  # a thread may enter its own RLock again
                holders.pop(tid, None)
            if len(holders) == 1:  # if there are two, they hold two locks that only seem to be the same
                ((other, held),) = holders.items()
                who = process.threads[other].title() + (" itself" if other == tid else "")
                what = f"`{lock.text}`, which its {who} holds since {held.place}"
                return what, "lock", [Need([self.key(process, other)])]
        return f"`{wait.locks[0].text}`, whose holder cannot be known", "unknown", []


def holders_of(lock, process):
    """Return {number of a thread: the lock as it holds it}. With several `with` blocks, the innermost counts."""
    pairs = [(tid, held) for tid, thread in process.threads.items() for held in reversed(thread.holds)]
    return {tid: held for tid, held in pairs if held.id == lock.id and lock.id and lock.type}


RULES = {  # by the kind of a wait
    "answer": Rules.answer,
    "shutdown": Rules.shutdown,
    "init": Rules.init,
    "collective": Rules.collective,
    "signal": Rules.signal,
    "lock": Rules.lock,
    "other": lambda rules, process, thread: (thread.wait.what, "busy", []),
}
