"""The rules: who must go on before a thread can. They turn the evidence into the nodes of the graph.

The key of a node is (name of a process, what, number). `what` is the number of a thread; CALL; "owed", for a Future
that a served function has returned; "pool", for the RPC threads; "gone", for all of a process that is lost; "callers",
for whoever may call a function; or "absent", for somebody of whom nothing is known, and who may do anything.

A rule returns (what a node waits for, its kind, its needs). No needs are given if the thread may go on by itself, or
if too little is known: then nobody is said to wait for it in a circle.
"""

from rpctrace.graph import CALL, Graph, Need, Node
from rpctrace.waits import OF_ALL

UNKNOWN = "nothing is known of it: it has ended, has not begun, or runs elsewhere"
CALLERS = ("another worker", "callers", 0)


def graph_of(processes):
    return Graph(Rules(processes).nodes)


class Rules:
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

    def key(self, process, what, number=0):
        return (process.name, "gone", 0) if process.lost else (process.name, what, number)

    def add(self, key, what, kind, needs, thread=None):
        """Add a node. `thread`: if it is one."""
        self.nodes[key] = Node(key[0], thread.title() if thread else "", what, kind, needs)
        if thread:
            self.nodes[key].place = thread.place
        return key

    def make_nodes(self, process):
        if process.lost:
            ended = ("gone", [Need([])]) if process.ended else ("silent", [])
            self.add(self.key(process, "gone"), process.lost, *ended)
        for tid, thread in process.threads.items():
            self.add(self.key(process, tid), *RULES[thread.wait.kind](self, process, thread), thread)

    def unknown_workers(self):
        """Return the keys of the workers of which nothing is known, or an empty list if there is none."""
        worlds, ranks = [one.world for one in self.workers], {one.rank for one in self.workers}
        if all(worlds) and max(worlds, default=0) <= len(worlds):
            return []
        if not all(worlds) or -1 in ranks:  # their number, or which of them are missing, is not known
            return [self.absent("another worker")]
        return [self.absent(f"rank {rank}") for rank in range(max(worlds)) if rank not in ranks]

    def absent(self, who):
        return self.add((who, "absent", 0), UNKNOWN, "absent", [])

    def pool(self, process):
        """Return the key of the RPC threads of a worker: if all are busy, one of them has to end what it does."""
        key, busy = self.key(process, "pool"), [self.key(process, tid) for tid in process.threads_of_torch()]
        if process.full():
            return self.add(key, f"all its {len(busy)} RPC threads are busy", "pool", [Need(busy)])
        return self.add(key, "it has a free RPC thread, and runs no Python function for this", "busy", [])

    # ------------------------------------------------------------------------------------------------------- calls

    def call(self, process, call):
        """Return the key of a call: it waits for who serves it, and for an RPC thread that takes the answer."""
        title = f"{call.to}'s answer" if call.to else "an answer"
        title += f" to {call.name}" if call.name else ""
        kind, needs = "call" if call.to else "guess", self.servers(process, call)
        if process.full():
            title += f"; no RPC thread of {process.name} is free to take it"
            kind, needs = "pool", [*needs, Need([self.pool(process)])] if needs else []
        key = self.key(process, CALL, f"{call.to} {call.name} {call.limit} {call.owes}")
        needs = [] if call.goes_on() else needs
        return self.add(key, title, kind if needs else "busy", needs)

    def servers(self, process, call):
        """Return what the answer to a call of this process needs, [] if that is not known."""
        owners = self.owners_of(call)
        if not owners:
            return [Need([self.absent(call.to)])] if call.to else []
        if len(owners) == 1 and owners[0].lost:
            return [Need([self.key(owners[0], "gone")])]
        if not call.name or not all(one.quiet and not one.lost for one in self.processes):
            return []  # its message may be on its way, or be served by somebody who is lost
        serving = self.serving(owners, call.name)
        if call.owes or any(served.owes for served in serving.values()):  # whoever completes it is not on any stack
            what = f"the Future that {call.name} has returned, which is not complete"
            return [Need([self.add((call.to or "a worker", "owed", call.name), what, "owed", [])])]
        # As no message is on its way, a thread serves the call, or it waits for one in a pool that is full.
        anyone = [*serving, *(self.pool(one) for one in owners if one.full() or not serving)]
        # Who calls somebody rarely means himself; and call_method(Agent.act, ...) runs act.
        shown = [key for key in serving if key[0] != process.name] or anyone
        shown = [key for key in shown if key in serving and serving[key].inner in call.mentions] or shown
        return [Need(anyone if call.to in self.by_name else anyone + self.strangers, shown)]

    def owners_of(self, call):
        """Return the workers that a call may be for: the one of this name, or all that may have it."""
        if call.to in self.by_name:
            return [self.by_name[call.to]]
        return [one for one in self.workers if not (call.to and one.named)]

    def serving(self, owners, name):
        """Return {key of a thread: the Call that it serves} of all that serve this function."""
        threads = [(self.key(one, tid), thread) for one in owners for tid, thread in one.threads.items()]
        return {key: served for key, thread in threads for served in thread.serves if served.name == name}

    # ------------------------------------------------------------------------------------------------------- threads

    def answer(self, process, thread):
        what, keys = thread.wait.what, [self.call(process, call) for call in thread.wait.calls]
        if not keys:
            return f"{what or 'a Future'}: whose is not known", "busy", []
        first = self.nodes[keys[0]]
        what = f"{what}: {first.what}" if what else first.what
        return (f"one of {len(keys)} calls, for example " if len(keys) > 1 else "") + what, first.kind, [Need(keys)]

    def shutdown(self, process, thread):
        """All workers have to come, and to end what they serve."""
        if thread.wait.timed or not process.world:
            return "the end of shutdown", "busy", []
        members = {one.name: one for one in self.workers if one is not process}
        members |= {key[0]: None for key in self.strangers}
        what, kind, needs = self.meeting("shutdown", members, lambda one: one.is_within("shutdown"))
        if needs:
            return what, kind, needs
        serving = [self.key(one, tid) for one in self.processes for tid, each in one.threads.items() if each.serves]
        return "the end of shutdown: calls are not answered", "call", [Need([key]) for key in serving]

    def init(self, process, thread):
        """init_rpc or init_process_group, by which a process gets its rank in a group.

        If all workers are here, a rank that has not come is one of those that have not called it.
        """
        name, begun, away = thread.wait.what, {}, []
        if thread.wait.timed or not thread.wait.world:
            return f"the other ranks, in {name}", "busy", []
        for one in self.processes:
            ranks = {each.does[name] for each in one.threads.values() if name in each.does}
            ranks |= {one.rank} if name == "init_rpc" and one.rpc else set()
            begun |= dict.fromkeys(ranks - {-1}, one)
            away += [one] * (one.rpc and not ranks and not (name == "init_process_group" and one.groups))
        members = {f"rank {number}": begun.get(number) for number in range(thread.wait.world)}
        others = away if len(self.workers) >= len(members) else []
        return self.meeting(f"{name} of {len(members)} ranks", members, lambda one: True, others=others)

    def collective(self, process, thread):
        """All members of the group have to begin the same one."""
        name = thread.wait.what
        if thread.wait.timed or process.groups != 1 or not name.startswith(OF_ALL):
            return f"{name}: the other side", "busy", []  # it is not known which group, or who may be ahead
        members = {one.name: one for one in self.processes if one.groups}

        def has_begun(other):
            return any((each.wait.kind, each.wait.what) == ("collective", name) for each in other.threads.values())

        what, kind, needs = self.meeting(name, members, has_begun, served=True)
        if needs:  # one of them has not begun it. Others may have, by async_op, and do not wait now
            anyone = [key for need in needs for key in need.anyone]
            needs = [Need(anyone + self.strangers, [key for need in needs for key in need.shown])]
        return what, kind, needs

    def meeting(self, what, members, has_come, served=False, others=()):
        """Everybody has to come. `members`: {who: its process, or None if nothing is known of it}.

        `served`: a function that is served may make that call, too. Otherwise only threads do that are not torch's.
        `others`: processes one of which each unknown member is.
        """
        missing, needs = [], []
        for who, one in members.items():
            if one and not one.lost and has_come(one):
                continue
            missing.append(who)
            able, processes = [], [one] if one else others
            for process in processes:
                own = [tid for tid in process.threads if served or tid not in process.threads_of_torch()]
                able += [self.key(process, tid) for tid in own] + [self.key(process, "gone")] * bool(process.lost)
            called = served and any(process.rpc and not process.lost for process in processes)
            needs.append(Need([*able, CALLERS] if called else able, able) if able else Need([self.absent(who)]))
        what = f"{', '.join(missing)} to begin {what}" if missing else f"the end of {what}, which all have begun"
        return what, "collective", needs

    def signal(self, process, thread):
        """Any other thread of the process may send it, but one that is in shutdown, and whoever calls a function."""
        wait, others = thread.wait, [tid for tid in process.threads if tid != thread.tid]
        if wait.timed:
            return f"a signal ({wait.what}), with a time limit", "busy", []
        if wait.joins in process.threads:
            return f"the end of {process.threads[wait.joins].title()}", "call", [Need([self.key(process, wait.joins)])]
        text = f"a signal of another thread of {process.name} ({wait.what})"
        if not self.still or process.unseen:  # an answer, which a dump does not show, may send it, too
            return text, "event", []
        shown = [self.key(process, tid) for tid in others if "shutdown" not in process.threads[tid].does]
        called = process.rpc and not process.full()
        return text, "event", [Need([*shown, CALLERS] if called else shown, shown)]

    def lock(self, process, thread):
        """Its holder is known if it tells, or if it stands in a `with` block of the same object."""
        tid, wait = thread.tid, thread.wait
        if wait.timed:
            return f"`{wait.locks[0].text}`, with a time limit", "busy", []
        for lock in wait.locks:
            for other, holder in process.threads.items():
                held = next((one for one in holder.holds if one.id == lock.id and lock.id), None)
                if held and (other != tid or lock.type == "lock"):  # a thread may enter its own RLock again
                    who = holder.title() + (" itself" if other == tid else "")
                    what = f"`{lock.text}`, which its {who} holds since {held.place}"
                    return what, "lock", [Need([self.key(process, other)])]
        return f"`{wait.locks[0].text}`, whose holder cannot be known", "busy", []


RULES = {  # by the kind of a wait
    "answer": Rules.answer,
    "shutdown": Rules.shutdown,
    "init": Rules.init,
    "collective": Rules.collective,
    "signal": Rules.signal,
    "lock": Rules.lock,
    "other": lambda rules, process, thread: (thread.wait.what, "busy", []),
}
