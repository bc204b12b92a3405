"""What is known of processes that hang: the same, whether it comes from a recording or from stacks.

A process has threads, and each thread waits for something. rules.py draws the conclusions.
"""

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

    def is_none(self):
        return self.type == "NoneType"


@dataclass
class Place:
    path: str = ""
    line: int = 0
    function: str = ""
    text: str = ""


@dataclass
class Call:
    """A call that is not answered. `to` is None if the stack does not tell whom it calls, and `name` what."""

    to: str | None
    name: str | None
    number: str = ""  # in a recording, the same at the caller and at the callee
    limit: float = 0.0  # seconds, 0: there is none
    since: int = 0
    rref: str = ""  # the RRef that it makes, or whose method it calls
    inner: str = ""  # the name of its first argument, if that is a function: call_method(Agent.act, ...) is common
    owes: bool = False  # the function answers by a Future (async_execution)
    bar: int = -1  # in a recording, the number of its bar

    def title(self):
        return f"{self.name}({self.inner}, ...)" if self.inner else self.name


@dataclass
class Wait:
    """What a thread waits for. `kind` is one of those of rules.RULES; the other fields are of some kinds only."""

    kind: str = "other"
    what: str = ""  # in words; or the name of the collective
    answers: list[list[Call]] = field(default_factory=list)  # it waits for an answer to one of each of these lists
    made_by: str = "nobody"  # who completes a Future that is no answer: "a thread", "C++", or "nobody" who is known
    locks: list[Seen] = field(default_factory=list)
    timed: bool = False
    again: bool = False  # it has the signal of a Condition, and needs its lock again
    enters: bool = False  # it enters a `with` of a Condition, and needs its lock
    joins: int | None = None  # the thread for whose end it waits
    group: str = ""
    rank: int = -1  # this process's, in a group that is being made
    world: int = 0
    limit: float = 0.0
    since: int = 0
    workers: list[int] = field(default_factory=list)  # the ranks that take part in a backward pass, if it tells


@dataclass
class Thread:
    tid: int
    name: str | None  # None: C++ has started it
    since: int = 0  # when it was seen first where it stands; 0 if it is not known
    place: Place = field(default_factory=Place)
    wait: Wait = field(default_factory=Wait)
    holds: list[Seen] = field(default_factory=list)
    serves: list[Call] = field(default_factory=list)  # the functions that it runs for others, the innermost last
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
class Meeting:
    """init_rpc, shutdown or init_process_group, in which this process waits for others."""

    name: str
    tid: int
    rank: int = -1


@dataclass
class Process:
    name: str
    host: str
    pid: int
    rank: int = -1  # in the RPC group
    world: int = 0  # its size, or 0 if processes may join and leave
    peers: dict[int, str] = field(default_factory=dict)  # rank -> name, as far as the process tells
    rpc: bool = False  # it has called init_rpc
    left: bool = False  # it has left it
    ts: int = 0
    moved: int = 0
    lost: str = ""  # how it was lost
    ended: bool = False
    main: int = 0
    threads: dict[int, Thread] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)  # that are made without a thread that waits
    owed: list[Call] = field(default_factory=list)  # served functions that have returned a Future, not complete yet
    meets: list[Meeting] = field(default_factory=list)
    does: list[str] = field(default_factory=list)  # names of meetings, and "backward"
    unseen: int = 0  # how many calls are not in the evidence
    pool: int = 0  # how many RPC threads it has, 0 if it is not known
    free: int = 1  # how many of them are free
    group_rank: int = -1
    members: dict[str, list[int]] = field(default_factory=dict)  # of its process groups
    counts: dict[str, int] = field(default_factory=dict)  # how many collectives it has begun in each
    exact: bool = True  # it is a recording: it tells which thread serves a call, and since when
    quiet: bool = True  # no message of it is on its way
    still: bool = True  # none of torch's own threads has run, so that nothing is computed, either

    def full(self):
        busy = sum(thread.of_torch() for thread in self.threads.values())
        return bool(self.pool) and self.free <= 0 and busy >= self.pool  # the others only handle messages, for a moment


@dataclass
class Evidence:
    """All processes, and when they were seen. `begun`: processes that do not meet the others yet."""

    processes: list[Process]
    now: int = 0
    begun: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # when processes have ended
    seen: str = "recorded"  # what all these processes are
    unknown: str = "nothing is known of it"  # what is said of others


def read_back(kind, written):
    """Return the dataclass of which asdict() has made these values."""
    inner = {"place": Place, "wait": Wait}
    several = {
        "calls": Call,
        "owed": Call,
        "serves": Call,
        "locks": Seen,
        "holds": Seen,
        "meets": Meeting,
        "processes": Process,
    }
    values = {}
    for name, value in written.items():
        if name == "threads":
            value = {int(tid): read_back(Thread, one) for tid, one in value.items()}
        elif name == "peers":
            value = {int(rank): peer for rank, peer in value.items()}
        elif name == "place" and kind is Seen:
            pass
        elif name == "answers":
            value = [[Call(**call) for call in calls] for calls in value]
        elif name in inner:
            value = read_back(inner[name], value)
        elif name in several:
            value = [read_back(several[name], one) for one in value]
        values[name] = value
    return kind(**values)
