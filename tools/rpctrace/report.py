"""The report: who waits for whom, the circle or the ends of the chains, and what to do."""

import collections
from dataclasses import dataclass, field

from rpctrace.dumps import UNREADABLE
from rpctrace.graph import CALL
from rpctrace.rules import graph_of

CIRCLE = "CIRCLE: each of these waits for the next one, and the last one for the first."
END = "END OF A CHAIN: for this the others wait."
PATTERNS = {  # what it is, and what to do; the more telling ones come first
    "pool": "all RPC threads of a process are busy. Return a Future (async_execution), or set num_worker_threads.",
    "collective": "a collective waits for its other members. All begin the same ones, before they wait for an RPC.",
    "lock": "a thread waits while it holds a lock that others need. Release it first, and only then call.",
    "gone": "a process has ended, and others wait for it. Find out why from its output, or from dmesg.",
    "silent": "a process does nothing any more. Wake it with kill -CONT, or see py-spy dump --native --pid ...",
    "absent": "a rank has not come, or is not known here. Start it, give --store, or look where it runs: --dump FILE.",
    "owed": "nobody completes a Future that a served function has returned. Find the line that should complete it.",
    "event": "nobody sends the signal for which a thread waits. Find the line that should: often one arrives too few.",
    "meeting": "not all have come to the line at which they meet. Look what the others do instead.",
    "call": "served functions wait for each other. Return what the caller needs, instead of calling it back.",
    "busy": "others wait for one that runs, or has a time limit. If it waits for something outside, set a limit, too.",
    "unknown": "who should go on first. Look at the line: who should answer, release or send?",
}


@dataclass
class Said:
    """What is found. `verdict`: circle, end or nothing."""

    verdict: str
    steps: list = field(default_factory=list)  # nodes: the circle, or the ends of the chains
    waits: list = field(default_factory=list)  # the other nodes that wait for somebody
    main: list = field(default_factory=list)  # the main threads, and the processes that are lost
    pattern: str = "busy"
    sure: bool = False
    limit: float = 0.0  # seconds after which a call of the circle fails; 0 if none does
    minutes: float = 0.0  # between the first and the last look into a process, at most
    runs: bool = False  # some thread computes, or may do so

    def report(self):
        """Return the text that is printed."""
        if self.verdict == "nothing":
            lines = ["No thread waits for another one, as far as is known."]
            lines += [line for nodes in alike(self.main)[:12] for line in of_nodes(nodes, "  ")]
            return "\n".join(lines)
        groups = alike(self.waits)
        lines = ["WHO WAITS FOR WHOM"] if groups else []
        for nodes in groups[:12]:
            lines += of_nodes(nodes, "  ")
        if len(groups) > 12:
            lines.append(f"  and {len(groups) - 12} more")
        circle = self.verdict == "circle"
        title = CIRCLE if self.sure else f"PROBABLY A {CIRCLE}"
        lines.append(title if circle else END)
        steps = [[node] for node in self.steps] if circle else alike(self.steps)
        for number, nodes in enumerate(steps, 1):
            lines += of_nodes(nodes, f"  {number}. " if len(steps) > 1 else "  ")
        guess = "Not known" if self.pattern == "unknown" else "Probably"
        lines.append(f"{'This is' if self.sure else guess}: {PATTERNS[self.pattern]}")
        if self.limit:
            lines.append(f"The first of these calls fails {self.limit:g} s after it was made.")
        if self.minutes >= 2:
            lines.append(f"But {self.minutes:.0f} minutes lie between the files: what waited may have gone on.")
        return "\n".join(lines)


def said_of(processes):
    """Return what is found about who waits for whom."""
    graph = graph_of(processes)
    nodes, circle = graph.nodes, graph.circle()
    certain = all(graph.next[key][other] for key, other in zip(circle, circle[1:] + circle[:1], strict=True))
    waiting, unknown = graph.waiting(), graph.unknown()
    steps = [key for key in circle if key[1] != CALL] or (graph.ends() if waiting else unknown[:3])
    # Somebody may still send the signal for which a living thread waits.
    kinds = {"unknown" if nodes[key].kind == "event" and key in graph.alive else nodes[key].kind for key in steps}
    moments = [process.moment for process in processes] or [0.0]
    return Said(
        verdict="circle" if circle else "end" if steps else "nothing",
        steps=[nodes[key] for key in steps],
        waits=[nodes[key] for key in waiting + unknown if key not in steps],
        main=[node for node in nodes.values() if node.thread == "main thread" or node.kind in ("silent", "gone")],
        # A "guess" is a call of which no stack tells whom it calls.
        pattern=next((kind for kind in PATTERNS if kind in kinds or (kind == "call" and "guess" in kinds)), "busy"),
        sure=bool(circle) and certain and len(set(moments)) == 1 and kinds.isdisjoint({"event", "guess"}),
        limit=min((nodes[key].limit for key in circle if nodes[key].limit), default=0.0),
        minutes=(max(moments) - min(moments)) / 60,
        runs=any(
            process.lost.startswith(UNREADABLE) or any(thread.ran for thread in process.threads.values())
            for process in processes
        ),
    )


def alike(nodes):
    """Return the nodes in groups, each of which waits for the same at the same place."""
    groups = collections.defaultdict(list)
    for node in nodes:
        groups[node.thread, node.what, node.place.place()].append(node)
    return list(groups.values())


def of_nodes(nodes, indent):
    """Return the lines of a node, or of several that wait for the same at the same place."""
    thread, what, place = nodes[0].thread, nodes[0].what, nodes[0].place
    who, several = ", ".join(dict.fromkeys(node.worker for node in nodes)), bool(thread) and len(nodes) > 1
    if several:
        who = f"{len(nodes)} threads ({who}: {thread})"
    elif thread:
        who += f"'s {thread}"
    waits = " wait for " if several else " waits for "
    lines = [f"{indent}{who}{waits if thread and not what.startswith('it ') else ': '}{what}"]
    if place.path:
        lines.append(f"{' ' * len(indent)}    {place.place()}, in {place.function}: {place.text}")
    return lines
