"""The report: who waits for whom, the circle or the ends of the chains, and what to do."""

import collections
from dataclasses import dataclass, field

from rpctrace.graph import CALL
from rpctrace.rules import graph_of

CIRCLE = "CIRCLE: each of these waits for the next one, and the last one for the first."
PATTERNS = {  # what it is, and an advice that stands alone; the more telling ones come first
    "pool": (
        "all RPC threads of a process are busy",
        "Let a function that others call return a Future (rpc.functions.async_execution) instead of waiting for a "
        "further call, or give the process more threads: TensorPipeRpcBackendOptions(num_worker_threads=...).",
    ),
    "collective": (
        "a collective waits for its other members",
        "All members have to begin the same collectives in the same order, so none may first wait for an RPC that "
        "needs what follows the collective.",
    ),
    "lock": (
        "a thread waits while it holds a lock that others need",
        "Never wait for an RPC while you hold a lock that served functions take: decide under the lock, release it, "
        "and only then call.",
    ),
    "gone": (
        "a process has ended, and others wait for it",
        "Find out why it has ended, from its output, or from dmesg if it used too much memory. Then start all again.",
    ),
    "silent": (
        "a process does nothing any more, and others wait for it",
        "Wake it with kill -CONT, or see what its C code does: py-spy dump --native --pid ...",
    ),
    "absent": (
        "a rank has not come, or is not known here",
        "Start it, or find out why it has ended. If it runs elsewhere, look there as well: why --dump FILE on each "
        "machine, then why FILE FILE.",
    ),
    "owed": (
        "nobody completes a Future that a served function has returned",
        "Find the line that should complete it: often it waits for one caller more than there are.",
    ),
    "backward": (
        "a backward pass waits for a gradient",
        "Let the hooks of a backward pass make no RPC that needs a lock of who called backward.",
    ),
    "event": (
        "nobody sends the signal for which a thread waits",
        "Find the line that should send it, and see whether anybody can still get there: often one arrives too few.",
    ),
    "call": (
        "served functions wait for each other",
        "Let a served function return what its caller needs, instead of calling the caller back.",
    ),
    "busy": (
        "a thread is busy, and others wait for it",
        "Look at the line where it stands: if it waits for something outside of the program, give that a time limit.",
    ),
}


@dataclass
class Said:
    """What is found. `verdict`: circle, end or nothing."""

    verdict: str
    steps: list = field(default_factory=list)  # nodes: the circle, or the ends of the chains
    waits: list = field(default_factory=list)  # the other nodes that wait for somebody
    main: list = field(default_factory=list)  # the main threads
    pattern: str = "busy"
    sure: bool = False
    seconds: float = 0.0  # for how long the youngest of the steps has waited
    moved: int = 0  # when something has moved last

    def is_long(self, seconds):
        """Return whether somebody has waited for so long that it is worth a report."""
        return any(node.seconds >= seconds for node in [*self.waits, *self.steps])

    def report(self):
        return "\n".join(lines_of(self))


def said_of(evidence):
    """Return what is found about who waits for whom."""
    graph = graph_of(evidence)
    nodes, circle = graph.nodes, graph.circle()
    recorded = all(process.exact for process in evidence.processes)
    young = 1 if recorded else 0  # stacks do not tell since when
    one_moment = recorded or len({process.host for process in evidence.processes}) == 1
    waits = [nodes[key] for key in graph.waiting() if key not in circle and nodes[key].seconds >= young]
    steps = [nodes[key] for key in circle or graph.ends() if key[1] != CALL] if circle or waits else []
    kinds = {node.kind for node in steps}
    certain = one_moment and kinds.isdisjoint({"backward", "event", "owed", "guess"})
    return Said(
        "circle" if circle else "end" if waits else "nothing",
        steps,
        waits,
        [node for node in nodes.values() if node.thread == "main thread"],
        next((kind for kind in PATTERNS if kind in kinds or (kind == "call" and "guess" in kinds)), "busy"),
        bool(circle) and certain,
        min((node.seconds for node in steps if node.thread), default=0.0),
        max([process.moved for process in evidence.processes] + evidence.ended, default=0),
    )


def lines_of(said):
    if said.verdict == "nothing":
        lines = ["No thread waits for another one, as far as is known."]
        return lines + [line for nodes in alike(said.main)[:12] for line in of_nodes(nodes, "  ")]
    groups = alike(said.waits)
    lines = ["WHO WAITS FOR WHOM"] if groups else []
    for nodes in groups[:12]:
        lines += of_nodes(nodes, "  ")
    if len(groups) > 12:
        lines.append(f"  and {len(groups) - 12} more")
    circle = said.verdict == "circle"
    lines.append(CIRCLE if circle else "END OF A CHAIN: for this the others wait.")
    steps = [[node] for node in said.steps] if circle else alike(said.steps)
    for number, nodes in enumerate(steps, 1):
        lines += of_nodes(nodes, f"  {number}. " if len(steps) > 1 else "  ")
    what, advice = PATTERNS[said.pattern]
    return [*lines, f"{'This is' if said.sure else 'Probably'}: {what}.", advice]


def alike(nodes):
    """Return the nodes in groups, each of which waits for the same at the same place."""
    groups = collections.defaultdict(list)
    for node in nodes:
        groups[node.thread, node.what, node.place.place()].append(node)
    return list(groups.values())


def of_nodes(nodes, indent):
    """Return the lines of a node, or of several that wait for the same at the same place."""
    thread, what, place = nodes[0].thread, nodes[0].what, nodes[0].place
    who, several = ", ".join(dict.fromkeys(node.worker for node in nodes)), len(nodes) > 1 and thread
    if several:
        who = f"{len(nodes)} threads ({who}: {thread})"
    elif thread:
        who += f"'s {thread}"
    seconds = max(node.seconds for node in nodes)
    waits = "wait for " if several else "waits for "
    if seconds:
        waits = f"{'have' if several else 'has'} waited {seconds:.0f} s for "
    lines = [f"{indent}{who}{f' {waits}' if thread and not what.startswith('it ') else ': '}{what}"]
    if place.path:
        lines.append(f"{' ' * len(indent)}    {place.place()}, in {place.function}: {place.text}")
    return lines
