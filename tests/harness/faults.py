"""Random failures: one rank of a job dies, and the behaviour of the other ranks is checked against CONTRACT.

A case (the job, the rank, and how and when it dies) is derived from a number, so that it can be repeated.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from fnmatch import fnmatch

from helpers import NOISE
from jobs import JOBS, WAYS, RunningJob
from processes import command_of
from programs import ROOT

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
ERRORS = {"exception": "ValueError", "memory": "MemoryError"}
KINDS = (*SIGNALS, *ERRORS, "sys.exit")
MOMENTS = ("start", "training", "end")

# What must happen; the first row that matches the case holds. Columns: kind of failure, way of starting, moment; then
# the exit statuses of the other ranks, a regular expression for a line of the output, how many of the other ranks must
# print a line of their own that names the dead rank, and the number of seconds after which all must have ended.
CONTRACT = [
    ("exception", "*", "training", {1}, r"rank {rank} \({name}\): ValueError: injected fault", "all but one", 15),
    ("memory", "*", "training", {1}, r"rank {rank} \({name}\): MemoryError: injected fault", "all but one", 15),
    ("sys.exit", "*", "training", {1}, r"rank {rank} \({name}\): it called sys.exit\(0\)", "all", 15),
    # torch does not tell the caller which rank has exited; its traceback shows the call and the place of the exit.
    (
        "served exit",
        "*",
        "training",
        {1},
        r"RuntimeError: SystemExit: 0",
        "some",
        15,
    ),
    ("SIG*", "*", "training", {1}, r"lost rank {rank} \({name}\)", "all", 15),
    # If the rank dies before it has joined, the others wait for it until --join_timeout, which is 20 s from their own
    # start. Starting takes long on a busy machine. torchrun may end the others before they notice.
    ("SIG*", "torchrun", "start", {1}, r"\({name}\)|\brank +: {rank} ", "some", 60),
    ("SIG*", "*", "start", {1}, r"\({name}\)", "some", 60),
    # At the end, the others may have noticed the loss, or its work may have been done already.
    # torchrun also fails if the rank was the last that had not ended, and nobody was left to notice.
    ("SIG*", "*", "end", {1}, r"lost rank {rank} \({name}\)|\brank +: {rank} ", "some", 15),
    ("SIG*", "*", "end", {0}, r"", "some", 15),
]


def draw_case(number):
    """Return the case of this number: (package, way, rank, kind, moment, seconds to wait at that moment)."""
    packages = list(JOBS)
    draw = random.Random(number)
    package, way = packages[number % 4], WAYS[number // 4 % 3]  # 12 successive cases have every pair
    rank = draw.randrange(len(JOBS[package]["names"]))
    kind = draw.choice(KINDS)
    moment = draw.choice(MOMENTS) if kind in SIGNALS else "training"
    return package, way, rank, kind, moment, round(draw.uniform(0.0, 3.0), 2)


def run_case(package, way, rank, kind, moment, seconds, cold=False):
    """Start the job, let one rank die, check CONTRACT; return after how many seconds the other ranks had ended.

    `cold`: the job is started as a user starts it, and a silent rank is lost after as many seconds as in main.py.
    (A job whose rank dies at the start is always started in this way.)
    """
    facts = JOBS[package]
    name, others = facts["names"][rank], [other for other in range(len(facts["names"])) if other != rank]
    rows = [row for row in CONTRACT if all(map(fnmatch, (kind, way, moment), row[:3]))]
    rows = rows if moment == "end" else rows[:1]
    flags = [*facts["short" if moment == "end" else "long"], "--join_timeout", "20"]
    fault = (rank, kind, seconds) if kind not in SIGNALS else None if cold else (0, "none", 0)
    with RunningJob(package, way, flags, fault=fault, cold=cold or moment == "start") as job:
        dead, peers = let_die(job, rank, kind, moment, seconds, others)
        died_at = time.monotonic()
        while any(map(command_of, peers)):  # as long as one of the other ranks is running
            assert time.monotonic() < died_at + rows[0][6], job.text()
            time.sleep(0.02)
        took = time.monotonic() - died_at
        # torchrun waits 30 s for a stopped process.
        statuses = job.wait(45 if (kind, way) == ("SIGSTOP", "torchrun") else 15)
        text, left = job.text(), job.survivors()
        if way == "terminals":  # a stopped rank cannot end, and no other process is responsible for ending it
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
        if way != "torchrun":  # torchrun's own report of a failure includes a traceback
            assert bool(re.search(NOISE, text)) == (kind in (*ERRORS, "served exit")), text
        return took


def let_die(job, rank, kind, moment, seconds, others):
    """Wait until the rank has died, or send it the signal; return (its process id, the process ids of `others`)."""
    facts = JOBS[job.package]
    if kind not in SIGNALS:
        pids = [job.pid_of(other) for other in others]
        job.wait_for_text("injected fault|called sys.exit|SystemExit: 0", 90 + seconds)
        return None, list(filter(None, pids))
    if moment != "start":
        job.wait_for_text(facts["training" if moment == "training" else "done"], 90)
    pid, pids = job.pid_of(rank), [job.pid_of(other) for other in others]
    time.sleep(seconds / 30 if moment == "end" else seconds)  # the random moment of this case
    with contextlib.suppress(ProcessLookupError, TypeError):  # the process may have ended already
        os.kill(pid, SIGNALS[kind])
    return pid, list(filter(None, pids))


def case_id(case):
    package, way, rank, kind, moment, seconds = case
    return f"{package}-{way}-{JOBS[package]['names'][rank]}-{kind}-{moment}-{seconds}"


def copy_with_mistake(package, folder, name, right, wrong):
    """Copy a package, and replace `right` by `wrong` wherever it stands in one of its files; return the main.py."""
    copy = folder / package
    shutil.copytree(ROOT / package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / name).read_text()
    assert right in text
    (copy / name).write_text(text.replace(right, wrong))
    return str(copy / "main.py")
