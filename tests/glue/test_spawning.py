"""What the starting process does when ranks end (launch.py).  The ranks are not processes, so the tests are fast."""

import argparse
import contextlib
import os
import signal
import socket
import types

import pytest

from helpers import package_on_path

with package_on_path("rl_rpc"):
    from glue import before_torch, ending, launch
    from glue.ending import End

LOST = End("lost", 1, "killed by SIGKILL")


@pytest.fixture
def args():
    return argparse.Namespace(world_size=3, agree=(), restarts=0, max_restarts=0, resume=False, trace=None)


@pytest.fixture(autouse=True)
def no_real_processes(monkeypatch):
    monkeypatch.setattr(before_torch, "start_fork_server", lambda: None)
    monkeypatch.setattr(before_torch, "stop_fork_server", lambda: None)
    monkeypatch.setattr(launch.watch, "signals_as_bytes", lambda: None)


def worker_name(rank, args):
    return f"observer{rank}" if rank else "agent"


# ------------------------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize(
    "ends, max_restarts, status, attempts",
    [
        ([None], 0, 0, [0]),
        ([LOST], 0, 1, [0]),
        ([LOST, None], 1, 0, [0, 1]),
        ([LOST, LOST], 1, 1, [0, 1]),
        ([LOST, LOST, None], 2, 0, [0, 1, 2]),
        ([End("failed", 0, "a bad file", again=False)], 2, 1, [0]),
        ([LOST, ending.interrupted(0, signal.SIGTERM)], 2, 143, [0, 1]),
    ],
)
def test_a_lost_job_starts_again(ends, max_restarts, status, attempts, args, monkeypatch, capsys):
    args.max_restarts, left, seen = max_restarts, list(ends), []

    def attempt(run_worker, args, worker_name, signals):
        seen.append(args.restarts)
        return left.pop(0)

    monkeypatch.setattr(launch, "_spawn_once", attempt)
    assert launch._spawn(None, args, worker_name) == status
    assert seen == attempts
    said = [f"rl_rpc: restart {number} of {max_restarts}" for number in range(1, len(attempts))]
    assert capsys.readouterr().err.splitlines() == said


# -------------------------------------------------------------------------------------------------- one group of ranks


class Rank:
    """A stand-in for a rank's process: its sentinel, a pipe that is closed when the rank ends, and its exit code."""

    def __init__(self, number, exitcode, ends_by_itself):
        self.sentinel, self.pipe = os.pipe()
        self.exitcode, self.pid = exitcode, 1000 + number
        if ends_by_itself:
            self.end()

    def end(self):
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None

    def join(self):
        os.close(self.sentinel)

    def kill(self):
        self.exitcode = -signal.SIGKILL
        self.end()


def spawn(args, monkeypatch, exitcodes, left=(), stuck=(), done=lambda store: None, signal_number=None):
    """Return the End of a group whose ranks end with `exitcodes`; those in `left` have reported that they are done.

    The ranks in `stuck` do not end by themselves.  `done(store)` is called before the first rank ends.  If
    `signal_number` is given, the starting process gets this signal.
    """
    plain_define = launch.define_job

    def define_job(store, args):
        plain_define(store, args)
        for rank in left:
            store.set(f"beat/{rank}", "left")
        done(store)

    ranks = []

    def start_processes(function, arguments, world_size, join, start_method):
        assert (world_size, join, start_method) == (args.world_size, False, "forkserver")
        ranks.extend(Rank(number, code, number not in stuck) for number, code in enumerate(exitcodes))
        return types.SimpleNamespace(processes=ranks)

    monkeypatch.setattr(launch, "define_job", define_job)
    monkeypatch.setattr(launch.mp, "start_processes", start_processes)
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(launch, "INTERRUPTED_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(launch.watch, "LOST_AFTER_SECONDS", 0.1)
    signals, sent = socket.socketpair()
    with signals, sent:
        if signal_number:
            sent.send(bytes([signal_number]))
        return launch._spawn_once(None, args, worker_name, signals), ranks


def test_ranks_that_have_done_their_work_end_the_job_well(args, monkeypatch, capsys):
    end, _ = spawn(args, monkeypatch, [0, 0, 0], left=[0, 1, 2])
    assert end is None and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("other_files", range(8))
def test_killed_ranks_could_not_say_why_so_the_starting_process_does(other_files, args, monkeypatch, capsys):
    """If memory is full, the kernel may kill several ranks before any of them notices.

    The first of them is named.  This must not depend on the numbers that the system gives to their pipes.
    """
    with contextlib.ExitStack() as files:
        for _ in range(other_files):
            files.enter_context(open(os.devnull))
        end, _ = spawn(args, monkeypatch, [-signal.SIGKILL] * 3)
    assert end == End("lost", 0, "killed by SIGKILL")
    assert capsys.readouterr().err == "rl_rpc: lost rank 0 (agent): killed by SIGKILL\n"


@pytest.mark.parametrize("status", [1, 2])
def test_what_a_rank_has_said_is_not_said_twice(status, args, monkeypatch, capsys):
    end, _ = spawn(args, monkeypatch, [status, -signal.SIGKILL, status])
    assert end.kind == "lost" and capsys.readouterr().err == ""


def test_a_rank_that_left_without_having_done_its_work_is_lost(args, monkeypatch, capsys):
    end, _ = spawn(args, monkeypatch, [0, 0, 0], left=[0, 2])
    assert end == End("lost", 1, "its process ended with exit status 0")


def test_a_rank_that_does_not_leave_when_all_others_have_is_killed(args, monkeypatch, capsys):
    end, ranks = spawn(args, monkeypatch, [0, 0, None], left=[0, 1, 2], stuck=[2])
    assert ranks[2].exitcode == -signal.SIGKILL
    assert end == End("lost", 2, "killed by SIGKILL")


def test_a_job_that_can_goes_on_without_a_killed_rank(args, monkeypatch, capsys):
    def workers(store):
        assert ending.lost(store) == {}
        ending.can_go_on_without(store, range(1, 3))

    end, _ = spawn(args, monkeypatch, [0, -signal.SIGKILL, 0], left=[0, 2], done=workers)
    assert end is None
    assert capsys.readouterr() == ("The job finished without rank 1 (observer1).\n", "")


@pytest.mark.timeout(20)
def test_a_rank_that_does_not_end_after_a_loss_is_killed(args, monkeypatch, capsys):
    end, ranks = spawn(args, monkeypatch, [None, -signal.SIGTERM, None], stuck=[0, 2])
    assert end == End("lost", 1, "killed by SIGTERM")
    assert ranks[0].exitcode == ranks[2].exitcode == -signal.SIGKILL


def test_a_signal_is_told_to_every_rank(args, monkeypatch, capsys):
    """Ctrl-C in a terminal reaches all ranks without our help, but a SIGTERM to the starting process does not."""
    told, stores, ranks = [], [], []

    def tell(pid, number):
        told.append((pid, number))
        if len(told) == args.world_size:  # then all ranks end
            for rank in ranks:
                rank.end()

    monkeypatch.setattr(launch.os, "kill", tell)
    status = 128 + signal.SIGTERM
    stuck = [0, 1, 2]  # until they get the signal
    end, _ = spawn(args, monkeypatch, [status] * 3, stuck=stuck, done=stores.append, signal_number=signal.SIGTERM)
    assert told == [(1000 + rank, signal.SIGTERM) for rank in range(3)]
    assert end.status == status and ending.read(stores[0].get("end")) == end
    assert capsys.readouterr() == ("", "")
