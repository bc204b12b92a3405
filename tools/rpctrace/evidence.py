"""What is known of processes that hang. A process has threads, and each thread waits for something.

rules.py draws the conclusions.
"""

import ast
import os
from dataclasses import dataclass, field, replace

SHORT = 30.0  # seconds: a call with a shorter time limit counts as a wait with a time limit, it goes on by itself


@dataclass
class Seen:
    """What is known of the value of an expression."""

    text: str
    type: str = ""  # the name of its class, or "" if it is not known
    id: object = 0  # the same for the same object of a process
    value: object = None  # of a number or a text; of a threading.Thread its number in the kernel
    place: str = ""  # of a lock: where it was taken


@dataclass
class Frame:
    """A function on a stack. `tree`: of its file; `names`: its variables; `blocks`, `waits`: see facts.py."""

    path: str = ""
    function: str = ""
    line: int = 0
    library: bool = False
    text: str = ""
    owner: str = ""  # the class whose method it is, if the stack tells; "<locals>" of a function within another one
    tree: ast.Module = field(default_factory=lambda: ast.Module([], []))
    names: dict[str, Seen] = field(default_factory=dict)
    blocks: list = field(default_factory=list)
    waits: list = field(default_factory=list)

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
    limit: float | None = 0.0  # seconds; 0: there is none; None: it is not known
    owes: bool | None = False  # the function answers by a Future (async_execution); None: it is not known
    owner: str = ""  # the class or the module of the function, as far as it is known
    # Of a served one: the function that it runs, for example act, of call_method(act, ...); or a decorator's wrapper.
    inner: str = ""
    mentions: frozenset[str] = frozenset()  # of an awaited one: the names in the function that waits

    def within(self, limit):
        """Return this call, of which somebody waits for the answer for at most so many seconds."""
        limits = {self.limit, limit} - {0}
        return replace(self, limit=None if None in limits else min(limits, default=0))

    def goes_on(self):
        """Return whether it may fail by itself, soon."""
        return self.limit is None or 0 < self.limit < SHORT


@dataclass
class Wait:
    """What a thread waits for. `kind` is one of those of rules.RULES, to some of which the other fields belong."""

    kind: str = "other"
    what: str = ""  # in words; or the name of the function (collective, init), or of the class (signal)
    calls: list[Call] = field(default_factory=list)  # answer: those it may be for, [] if that is not known
    locks: list[Seen] = field(default_factory=list)  # lock
    timed: bool = False  # lock, signal, shutdown, collective, init: it ends by itself
    joins: int | None = None  # signal: the thread for whose end it waits
    world: int = 0  # init: how many ranks come


@dataclass
class Thread:
    tid: int
    name: str | None  # None: C++ has started it
    place: Frame = field(default_factory=Frame)  # the innermost line of the program
    wait: Wait = field(default_factory=Wait)
    holds: list[Seen] = field(default_factory=list)
    serves: list[Call] = field(default_factory=list)  # the functions that it runs for others, the innermost last
    does: dict[str, int] = field(default_factory=dict)  # what it is within, init_rpc and the like -> its rank there
    main: bool = False
    ran: bool = False  # it has used the CPU

    def of_torch(self):
        """Return whether torch has started this thread: it serves a call, or runs a callback or a hook."""
        return bool(self.serves) or ((self.name or "Dummy").startswith("Dummy") and not self.main)

    def prepares(self):
        """Return whether it may read a call or write an answer, or prepares a call: torch asks for an RRef's class."""
        name = self.serves[-1].name if self.serves else None
        return name is None or name.startswith("torch.")

    def title(self):
        if self.main:
            return "main thread"
        if self.serves:
            return f"RPC thread that runs {self.serves[-1].name or self.serves[-1].inner}"
        return "thread of torch" if self.of_torch() else f"thread {self.name}"


@dataclass
class Process:
    name: str
    host: str
    pid: int
    named: bool = True  # its name is known
    rank: int = -1  # in the RPC group
    world: int = 0  # its size, or 0 if processes may join and leave, or it is not known
    rpc: bool = False  # it has called init_rpc, or is lost, and that is not known
    groups: int = 0  # how many process groups of gloo it is in: the first one is that of all
    lost: str = ""  # how it was lost
    ended: bool = False
    moment: float = 0.0  # when it was looked at, in seconds since 1970
    threads: dict[int, Thread] = field(default_factory=dict)
    pool: int = 0  # how many RPC threads it has
    free: int = 1  # how many of them are free
    quiet: bool = True  # no message of it is on its way
    unseen: bool = False  # something that no stack shows may send a signal: a handler, or a callback of a Future
    still: bool = True  # none of torch's own threads has run, so that nothing is computed, either

    def is_within(self, what):
        """Return whether one of its threads is within init_rpc, shutdown or init_process_group."""
        return any(what in thread.does for thread in self.threads.values())

    def threads_of_torch(self):
        return [tid for tid, thread in self.threads.items() if thread.of_torch()]

    def full(self):
        """Return whether all its RPC threads are busy. Those without a stack only handle messages, for a moment."""
        return bool(self.pool) and self.free <= 0 and len(self.threads_of_torch()) >= self.pool
