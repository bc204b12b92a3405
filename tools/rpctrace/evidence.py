"""What is known of processes that hang: the same, whether it was recorded, or seen by py-spy.

A process has threads, and each thread waits for something. rules.py draws the conclusions.
"""

import os
from dataclasses import dataclass, field

SHORT = 30.0  # seconds: a call with a shorter time limit counts as a wait with a time limit, it goes on by itself


@dataclass
class Seen:
    """What is known of the value of an expression, above all of a lock."""

    text: str
    type: str = ""  # the name of its class, or "" if it is not known
    id: object = 0  # the same for the same object of a process
    owner: int | None = None  # the thread that holds it, if it tells
    value: object = None  # of a number or a text
    place: str = ""  # where it was taken


@dataclass
class Frame:
    """A function on a stack. `names`: variables of a library's frame; `facts`: see record/rpctrace_syntax.py."""

    path: str = ""
    function: str = ""
    line: int = 0
    library: bool = False
    text: str = ""
    names: dict[str, Seen] = field(default_factory=dict)
    facts: list[dict] = field(default_factory=list)
    answers: list[dict] = field(default_factory=list)  # the calls for one of which its line waits

    def value(self, name, default=None):
        value = self.names[name].value if name in self.names else None
        return default if value is None else value

    def place(self):
        return f"{os.path.basename(self.path)}:{self.line}"


@dataclass
class Call:
    """A call that is not answered. `to` is None if it is not known whom it calls, and `name` what."""

    to: str | None
    name: str | None
    number: str = ""  # in a recording, the same at the caller and at the callee
    limit: float = 0.0  # seconds, 0: there is none
    since: int = 0
    rref: str = ""  # in a recording, the RRef that it makes
    inner: str = ""  # the name of its first argument, if that is a function: call_method(Agent.act, ...) is common
    owes: bool | None = False  # the function answers by a Future (async_execution); None: it may do so
    bar: int = -1  # in a recording, the number of its bar

    def title(self):
        return f"{self.name}({self.inner}, ...)" if self.inner else self.name


@dataclass
class Wait:
    """What a thread waits for. `kind` is one of those of rules.RULES, and most other fields belong to some of them."""

    kind: str = "other"
    what: str = ""  # in words; or (collective, init) the name of the function
    answers: list[list[Call]] = field(default_factory=list)  # answer, rref: it needs one of each of these lists
    made_by: str = "nobody"  # answer: who completes a Future that is none: "a thread", "C++", or "nobody" who is known
    locks: list[Seen] = field(default_factory=list)  # lock, signal
    timed: bool = False  # lock, signal, shutdown: it ends by itself
    again: bool = False  # signal: it has that of a Condition, and needs its lock again
    enters: bool = False  # signal: it enters a `with` of a Condition, and needs its lock
    joins: int | None = None  # signal: the thread for whose end it waits
    group: str = ""  # collective
    world: int = 0  # init: how many ranks come
    limit: float = 0.0  # shutdown
    since: int = 0
    workers: list[int] = field(default_factory=list)  # backward: the ranks that take part, if it tells


@dataclass
class Thread:
    tid: int
    name: str | None  # None: C++ has started it
    since: int = 0  # when it was seen first where it stands; 0 if it is not known
    place: Frame = field(default_factory=Frame)  # the innermost line of the program
    wait: Wait = field(default_factory=Wait)
    holds: list[Seen] = field(default_factory=list)
    serves: list[Call] = field(default_factory=list)  # the functions that it runs for others, the innermost last
    does: dict[str, int] = field(default_factory=dict)  # what it is within, init_rpc and the like -> its rank there
    main: bool = False
    autograd: bool = False  # it stands within the backward pass of a function

    def of_torch(self):
        """Return whether torch has started this thread: it serves a call, or runs a callback or a hook."""
        return bool(self.serves) or ((self.name or "Dummy").startswith("Dummy") and not self.main)

    def title(self):
        if self.main:
            return "main thread"
        if self.serves:
            return f"RPC thread that runs {self.serves[-1].title()}"
        return "thread of torch" if self.of_torch() else f"thread {self.name}"


@dataclass
class Process:
    name: str
    host: str
    pid: int
    exact: bool = True  # it is a recording: it tells which thread serves a call, and since when
    rank: int = -1  # in the RPC group
    world: int = 0  # its size, or 0 if processes may join and leave, or it is not known
    rpc: bool = False  # it has called init_rpc
    left: bool = False  # it has left it
    named: bool = True  # its name is known
    ts: int = 0
    moved: int = 0
    lost: str = ""  # how it was lost
    ended: bool = False
    main: int = 0
    threads: dict[int, Thread] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)  # that are made without a thread that waits
    owed: list[Call] = field(default_factory=list)  # served functions that have returned a Future, not complete yet
    unseen: int = 0  # how many calls are not in the evidence
    pool: int = 0  # how many RPC threads it has, 0 if it is not known
    free: int = 1  # how many of them are free
    group_rank: int = -1
    members: dict[str, list[int]] = field(default_factory=dict)  # of its process groups
    counts: dict[str, int] = field(default_factory=dict)  # how many collectives it has begun in each
    quiet: bool = True  # no message of it is on its way
    still: bool = True  # none of torch's own threads has run, so that nothing is computed, either

    def does(self, what):
        """Return whether one of its threads is within init_rpc, shutdown, init_process_group or backward."""
        return any(what in thread.does for thread in self.threads.values())

    def of_torch(self):
        return [tid for tid, thread in self.threads.items() if thread.of_torch()]

    def full(self):
        """Return whether all its RPC threads are busy. Those without a stack only handle messages, for a moment."""
        return bool(self.pool) and self.free <= 0 and len(self.of_torch()) >= self.pool


@dataclass
class Evidence:
    """All processes, and when they were seen."""

    processes: list[Process]
    now: int = 0
    ended: list[int] = field(default_factory=list)  # when processes have ended
