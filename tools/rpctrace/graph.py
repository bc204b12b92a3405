"""The graph of who waits for whom: who cannot go on, a circle among them, and the ends of the chains.

A node is a thread, or something else that somebody waits for. What it needs is a list of groups: one member of each
group must go on before the node can. A call needs the thread that serves it, and a lock the thread that holds it; such
a group has one member. A Condition may be notified by any other thread of its process; such a group has many members. A
node that needs nothing is alive. And then every node is alive of whose groups each has a living member. The others
cannot go on, whatever happens. Only among these is a circle looked for.
"""

import collections
import itertools
from dataclasses import dataclass, field

from rpctrace.evidence import Frame

CALLERS, CALL = "callers", "call"  # keys[1] of nodes that stand for all who may call a process, and for a call


@dataclass
class Node:
    worker: str
    thread: str  # its title, or "" if it is something else
    what: str  # it waits for, or does
    kind: str  # a key of words.PATTERNS
    needs: list = field(default_factory=list)
    place: Frame = field(default_factory=Frame)
    seconds: float = 0.0


class Graph:
    def __init__(self, nodes):
        """`nodes`: {key: Node}. A key is (worker, what, number)."""
        self.nodes, self.alive, before = nodes, set(), None
        while self.alive != before:
            before = self.alive
            able = [key for key, node in nodes.items() if all(self.alive.intersection(one) for one in node.needs)]
            self.alive = self.alive.union(able)

    def following(self, key):
        """Return {the nodes for which this one waits: whether it must be this one}.

        For one that cannot go on, these are the members of the groups in which nobody can. For a living one, they are
        the living members of all its groups, but if it may be any of several, it is not known for whom it waits.
        """
        found, node, lives = {}, self.nodes[key], key in self.alive
        for group in node.needs:
            if lives or not self.alive.intersection(group):
                if node.kind == "guess":  # who calls somebody, calls rarely himself
                    group = [one for one in group if one[0] != key[0]] or group
                must = self.leaves_no_choice(node.kind, group)
                found |= {one: must for one in group if one[1] != CALLERS and (one in self.alive) == lives}
        return {} if lives and len(found) > 1 and not any(found.values()) else found

    def leaves_no_choice(self, kind, group):
        """Return whether it must be a certain member of a group, or one of several that are alike."""
        if kind == "collective":  # a call that may come is no member yet
            group = [one for one in group if one[1] != CALLERS]
        alike = {(self.nodes[one].what, self.nodes[one].place.place()) for one in group}
        return len(set(group)) == 1 or (kind in ("call", "guess", "lock") and len(alike) == 1)

    def circle(self):
        """Return the shortest circle of nodes that cannot go on. If possible, none of its steps leaves a choice."""
        return self.shortest(choices=False) or self.shortest(choices=True)

    def shortest(self, choices):
        """`choices`: steps may leave one, but not all of them. No call does: it has one callee, even an unknown one."""
        best = []
        for start in (key for key in self.nodes if key not in self.alive):
            paths, seen = collections.deque([[start]]), {start}
            while paths and not (best and len(paths[0]) >= len(best)):
                path = paths.popleft()
                may_choose = choices and self.nodes[path[-1]].kind not in ("call", "guess")
                following = self.following(path[-1])
                for other in (one for one, must in following.items() if must or may_choose):
                    steps = itertools.pairwise([*path, other])
                    if other == start and any(self.following(one)[two] for one, two in steps):
                        best = path
                    elif other not in seen:
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
                # It is also an end if several might let it go on, but none of them must.
                counts[key] += not (following if key in self.alive else any(following.values()))
        order = sorted(+counts, key=lambda key: (key in self.alive, self.nodes[key].kind == "event", -counts[key]))
        return [key for key in order if (key in self.alive) == (order[0] in self.alive)][:3]

    def waiting(self):
        """Return the keys of the threads that wait for others, the longest first."""
        found = [key for key, node in self.nodes.items() if node.thread and node.needs and node.place.path]
        return sorted(found, key=lambda key: -self.nodes[key].seconds)
