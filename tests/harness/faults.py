"""Deaths drawn from a number: one rank of a job dies, and what the contract promises of the others is checked."""

import contextlib
import os
import random
import re
import signal
import time

from helpers import NOISE
from jobs import JOBS, WAYS, Job, command_of

SECONDS_TO_END = 15  # the contract
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
ERRORS = {"exception": "ValueError", "memory": "MemoryError"}
KINDS = (*SIGNALS, *ERRORS, "sys.exit")
MOMENTS = ("start", "training", "end")


def draw_case(number):
    """One case from a seed: (package, way, rank, kind, moment, seconds to wait at that moment)."""
    packages = list(JOBS)
    draw = random.Random(number)
    package, way = packages[number % 4], WAYS[number // 4 % 3]  # every pair comes up in 12 cases
    rank = draw.randrange(len(JOBS[package]["names"]))
    kind = draw.choice(KINDS)
    moment = draw.choice(MOMENTS) if kind in SIGNALS else "training"
    return package, way, rank, kind, moment, round(draw.uniform(0.0, 3.0), 2)


def run_case(package, way, rank, kind, moment, seconds):
    """Start the job, let one rank die, check what the contract promises; return the seconds that the others took."""
    facts = JOBS[package]
    name = facts["names"][rank]
    flags = [*facts["short" if moment == "end" else "long"], "--join_timeout", "20"]
    with Job(package, way, flags, fault=None if kind in SIGNALS else (rank, kind, seconds)) as job:
        if kind in SIGNALS:
            if moment == "start":
                pid = job.pid_of(rank)
                time.sleep(seconds)  # the case's random moment, not a wait for anything
            else:
                job.wait_for_text(facts["training" if moment == "training" else "done"], 90)
                pid = job.pid_of(rank)
                time.sleep(seconds if moment == "training" else seconds / 30)
            peers = [job.pid_of(other) for other in range(len(facts["names"])) if other != rank]
            with contextlib.suppress(ProcessLookupError, TypeError):  # it may have ended by itself
                os.kill(pid, SIGNALS[kind])
        else:
            job.wait_for_text("injected fault|left in the middle", 90 + seconds)
            pid = None
        died_at = time.monotonic()
        # A rank that dies before it met the others is one that never came: --join_timeout counts for it.
        patience = SECONDS_TO_END + 25 * (moment == "start")
        if kind == "SIGSTOP" and way == "torchrun":  # it waits half a minute for the stopped process, then kills it
            wait_until_gone(peers, patience)
            took = time.monotonic() - died_at
            statuses = job.wait(45)
        else:
            statuses = job.wait(patience)
            took = time.monotonic() - died_at
        text, left = job.text(), job.survivors()
        if kind == "SIGSTOP" and way == "terminals":  # the stopped process cannot leave: it is its terminal's to end
            left = [survivor for survivor in left if survivor != pid]
        assert not left, (left, text)
        others = [status for number, status in enumerate(statuses) if way != "terminals" or number != rank]
        if moment == "end" and set(others) == {0}:
            return took  # the death came too late: all the work was done
        assert set(others) == {1}, (statuses, text)
        if moment == "start" and way == "torchrun":  # it ends the others at once, before they know whom to expect
            assert f"({name})" in text or re.search(rf"\brank +: {rank} ", text), text
        else:
            assert f"({name})" in text, text
        if way != "torchrun":  # its own report of a failure has a traceback
            assert not re.search(NOISE, text), text
        if kind in ERRORS:
            assert f"rank {rank} ({name}): {ERRORS[kind]}: injected fault" in text, text
        if moment == "training":
            silent = [
                other
                for other, other_name in enumerate(facts["names"])
                if other != rank and f"rank {other} ({other_name}): lost rank {rank} ({name})" not in text
            ]
            # A rank that met the error as the answer to its own call has printed the error instead.
            assert len(silent) <= (kind in ERRORS), (silent, text)
        return took


def wait_until_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if command_of(pid)]:
        assert time.monotonic() < deadline, f"processes {left} still there after {seconds} s"
        time.sleep(0.05)


def case_id(case):
    package, way, rank, kind, moment, seconds = case
    return f"{package}-{way}-{JOBS[package]['names'][rank]}-{kind}-{moment}-{seconds}"
