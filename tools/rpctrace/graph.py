"""The graph of who waits for whom: who cannot go on, a circle among them, and the ends of the chains.

A node is a thread, or something for which threads wait, a call for example. It has needs, and goes on when all of them
are met. A need is met when any one of several nodes goes on. For example, who waits for a lock needs the one thread
that holds it, and who waits for a Condition needs any other thread of the process.

A node without needs is alive, and so is one each of whose needs can be met by a living node. All others are stuck,
whatever happens, and only among them a circle is looked for.

rules.py marks the likely nodes of each need (Need.shown), and a step goes from a node to one of these. It is certain if
there is only one, or if all of them wait for the same at the same place. Otherwise it is a choice. (For a signal, the
kind "event", it is certain only if nobody else could send it.) The circle with the fewest choices is reported. If all
of its steps are choices, it says nothing. It never goes through a choice at a call, which only one thread serves.

For example, a thread waits for a call on w1, and two threads of w1 serve calls of this name. Both are shown, because
either may send the answer. If both wait for the same lock at the same line, the step is certain. If they wait for
different things, it is a choice.
"""

import collections
import heapq
import itertools
from dataclasses import dataclass, field

from rpctrace.evidence import Frame

CALL = "a call"  # key[1] of nodes that stand for a call


class Need:
    """One of the nodes with these keys must go on; none ever does if there are none.

    `shown`: the likely ones, to which a step may go.
    """

    def __init__(self, anyone, shown=None):
        self.anyone = anyone
        self.shown = anyone if shown is None else shown

    def has_others(self):
        """Return whether somebody who is not shown may meet the need, too."""
        return set(self.shown) != set(self.anyone)


@dataclass
class Node:
    worker: str
    thread: str  # its title, or "" if it is something else
    what: str  # as it is printed after "waits for"; or what it does, which begins with "it "
    kind: str  # a key of report.PATTERNS, or "guess": a call of which it is not certain who serves it
    needs: list[Need] = field(default_factory=list)
    place: Frame = field(default_factory=Frame)
    limit: float = 0.0  # of a call: seconds after which it fails; 0 if it never does


class Graph:
    def __init__(self, nodes):
        """`nodes`: {key: Node}. rules.py explains a key."""
        self.nodes, self.alive, before = nodes, set(), None
        while self.alive != before:
            before = self.alive
            self.alive = {key for key, node in nodes.items() if all(map(self.can_be_met, node.needs))}
        self.next = {key: self.steps(key) for key in nodes}

    def can_be_met(self, need):
        return not self.alive.isdisjoint(need.anyone)

    def steps(self, key):
        """Return {node to which a step may go: whether it is certain}.

        From a stuck node, these are the likely nodes of the needs that cannot be met. From a living node, they are the
        likely ones that are alive. If a living thread has several, and none is certain, it has no steps: it is an end.
        """
        found, node, lives = {}, self.nodes[key], key in self.alive
        needs = node.needs if lives else [need for need in node.needs if not self.can_be_met(need)]
        for need in needs:
            shown = [one for one in need.shown if (one in self.alive) == lives]
            found |= dict.fromkeys(shown, self.is_certain(node, need))
        return {} if lives and node.thread and len(found) > 1 and not any(found.values()) else found

    def is_certain(self, node, need):
        if node.kind == "event":  # others might do it, even if they wait for the same now
            return len(set(need.anyone)) == 1
        return len({(self.nodes[one].what, self.nodes[one].place.place()) for one in need.shown}) == 1

    def circle(self):
        """Return the keys of a circle of stuck nodes, or []. At least one of its steps is certain."""
        starts = [key for key, node in self.nodes.items() if key not in self.alive and node.thread]
        found = filter(None, map(self.way_back, starts))
        choices, circle = min(found, default=(0, []), key=lambda one: (one[0], len(one[1])))
        if choices == len(circle):  # or there is none
            return []
        first = min(circle, key=lambda key: (self.nodes[key].thread != "main thread", key[0]))
        return circle[circle.index(first) :] + circle[: circle.index(first)]

    def way_back(self, start):
        """Return (number of choices, keys) of the way from a node back to itself with the fewest, or None."""
        ways, numbers, seen = [(0, 1, 0, [start])], itertools.count(1), set()
        while ways:
            choices, length, _, way = heapq.heappop(ways)
            here = way[-1]
            if here == start and length > 1:
                return choices, way[:-1]
            if here in seen:
                continue
            seen.add(here)
            for other, certain in self.next[here].items():
                if certain or here[1] != CALL:  # a call has one callee, even if it is not known which
                    heapq.heappush(ways, (choices + (not certain), length + 1, next(numbers), [*way, other]))
        return None

    def ends(self):
        """Return the nodes at the ends of the chains: those for which the most others wait come first."""
        counts = collections.Counter()
        for start in self.waiting():
            found = self.ends_from(start, self.next.get)
            # If the likely ones wait for each other, one goes on that is less likely.
            counts.update(found or self.ends_from(start, self.living))
        order = sorted(counts, key=lambda key: (key in self.alive, self.nodes[key].kind == "event", -counts[key]))
        order = [key for key in order if key[1] != CALL] or order  # of a call, who should answer it says more
        return [key for key in order if (key in self.alive) == (order[0] in self.alive)][:3]

    def ends_from(self, start, others):
        """Return the ends that are reached from a node. `others`: a function that returns to which nodes one leads."""
        keys = [start]
        for key in keys:  # which grows
            keys += [other for other in others(key) if other not in keys]
        return [key for key in keys if self.is_end(key)]

    def living(self, key):
        return [other for need in self.nodes[key].needs for other in need.anyone if other in self.alive]

    def is_end(self, key):
        """Return whether no step leads on. A stuck node is also an end if all its steps are choices."""
        steps = self.next[key]
        return not steps if key in self.alive else not any(steps.values())

    def waiting(self):
        """Return the keys of the threads that wait for others."""
        return [key for key, node in self.nodes.items() if node.thread and node.needs and node.place.path]

    def unknown(self):
        """Return the keys of the threads that wait, it is not known for whom."""
        kinds = ("unknown", "event")
        return [key for key, node in self.nodes.items() if node.thread and not node.needs and node.kind in kinds]
