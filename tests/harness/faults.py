"""Deaths drawn from a number: one rank of a job dies, and what the contract promises of the others is checked."""

import contextlib
import os
import random
import re
import signal
import time
from fnmatch import fnmatch

from helpers import NOISE
from jobs import JOBS, WAYS, Job, command_of

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
ERRORS = {"exception": "ValueError", "memory": "MemoryError"}
KINDS = (*SIGNALS, *ERRORS, "sys.exit")
MOMENTS = ("start", "training", "end")

# The contract, first row that fits: what the other ranks' statuses are, a line that stands in the output, how many of
# the others name the dead rank in a line of their own, and within how many seconds all is over.
# (kind, way of starting, moment, statuses, line, others, seconds)
CONTRACT = [
    ("exception", "*", "training", {1}, r"rank {rank} \({name}\): ValueError: injected fault", "all but one", 15),
    ("memory", "*", "training", {1}, r"rank {rank} \({name}\): MemoryError: injected fault", "all but one", 15),
    ("sys.exit", "*", "training", {1}, r"rank {rank} \({name}\): it called sys.exit\(0\)", "all", 15),
    # The rank that called the function names itself as the caller: nothing tells it which rank has left.
    (
        "served exit",
        "*",
        "training",
        {1},
        r"a function that it called on another rank ended with SystemExit: 0",
        "some",
        15,
    ),
    ("SIG*", "*", "training", {1}, r"lost rank {rank} \({name}\)", "all", 15),
    # Before it met the others it is one that never came (--join_timeout 20, from when they
    # themselves have started, which takes its time on a busy machine); torchrun may end them before they know.
    ("SIG*", "torchrun", "start", {1}, r"\({name}\)|\brank +: {rank} ", "some", 60),
    ("SIG*", "*", "start", {1}, r"\({name}\)", "some", 60),
    # At the end it may have been missed, or its work was done already.
    ("SIG*", "*", "end", {1}, r"lost rank {rank} \({name}\)", "some", 15),
    ("SIG*", "*", "end", {0}, r"", "some", 15),
]


def draw_case(number):
    """One case from a seed: (package, way, rank, kind, moment, seconds to wait at that moment)."""
    packages = list(JOBS)
    draw = random.Random(number)
    package, way = packages[number % 4], WAYS[number // 4 % 3]  # every pair comes up in 12 cases
    rank = draw.randrange(len(JOBS[package]["names"]))
    kind = draw.choice(KINDS)
    moment = draw.choice(MOMENTS) if kind in SIGNALS else "training"
    return package, way, rank, kind, moment, round(draw.uniform(0.0, 3.0), 2)


def run_case(package, way, rank, kind, moment, seconds, impatient=False):
    """Start the job, let one rank die, check what the contract promises; return the seconds that the others took.

    `impatient`: silent ranks are lost sooner than they are in main.py, which saves time and changes nothing else.
    """
    facts = JOBS[package]
    name, others = facts["names"][rank], [other for other in range(len(facts["names"])) if other != rank]
    rows = [row for row in CONTRACT if all(map(fnmatch, (kind, way, moment), row[:3]))]
    rows = rows if moment == "end" else rows[:1]
    flags = [*facts["short" if moment == "end" else "long"], "--join_timeout", "20"]
    fault = (rank, kind, seconds) if kind not in SIGNALS else (0, "none", 0) if impatient else None
    with Job(package, way, flags, fault=fault) as job:
        dead, peers = let_die(job, rank, kind, moment, seconds, others)
        died_at = time.monotonic()
        while any(map(command_of, peers)):  # ends that the commands we started do not show: spawned, under torchrun
            assert time.monotonic() < died_at + rows[0][6], job.text()
            time.sleep(0.02)
        took = time.monotonic() - died_at
        statuses = job.wait(45 if (kind, way) == ("SIGSTOP", "torchrun") else 15)  # torchrun waits for it: its own 30 s
        text, left = job.text(), job.survivors()
        if way == "terminals":  # what is started there ends by itself; a stopped process is its terminal's to end
            statuses = [status for number, status in enumerate(statuses) if number != rank]
            left = [pid for pid in left if pid != dead]
        assert not left, (left, text)
        (row,) = [row for row in rows if row[3] == set(statuses)] or [None]
        assert row, (statuses, text)
        assert re.search(row[4].format(rank=rank, name=name), text), text
        silent = [
            other
            for other in others
            if f"rank {other} ({facts['names'][other]}): lost rank {rank} ({name})" not in text
        ]
        assert len(silent) <= {"all": 0, "all but one": 1, "some": len(others)}[row[5]], (silent, text)
        if way != "torchrun":  # its own report of a failure has a traceback
            assert not re.search(NOISE, text), text
        return took


def let_die(job, rank, kind, moment, seconds, others):
    """Return (the dead rank's process id, its peers') as soon as it is dead."""
    facts = JOBS[job.package]
    if kind not in SIGNALS:
        pids = [job.pid_of(other) for other in others]
        job.wait_for_text("injected fault|left in the middle|ended with SystemExit", 90 + seconds)
        return None, list(filter(None, pids))
    if moment != "start":
        job.wait_for_text(facts["training" if moment == "training" else "done"], 90)
    pid, pids = job.pid_of(rank), [job.pid_of(other) for other in others]
    time.sleep(seconds / 30 if moment == "end" else seconds)  # the case's random moment, not a wait for anything
    with contextlib.suppress(ProcessLookupError, TypeError):  # it may have ended by itself
        os.kill(pid, SIGNALS[kind])
    return pid, list(filter(None, pids))


def case_id(case):
    package, way, rank, kind, moment, seconds = case
    return f"{package}-{way}-{JOBS[package]['names'][rank]}-{kind}-{moment}-{seconds}"
