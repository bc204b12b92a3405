"""Which ranks a rank waits for (job.py).  The store is a real one; the ranks are threads."""

import argparse
import socket
import threading

import pytest
import torch.distributed as dist

from helpers import package_on_path

with package_on_path("rl_rpc"):
    from glue import ending, meeting
    from glue.job import Job

SOON = 10  # seconds; everything in these tests is faster


class Rank(Job):
    """A Job that has joined, and that does not end its process, which is the process of the tests."""

    def __init__(self, rank, world_size, port, on_lost="stop"):
        args = argparse.Namespace(world_size=world_size, on_lost=on_lost, torchrun=False, restarts=0)
        super().__init__(rank, args, lambda rank, args: f"worker{rank}", port)
        self.main_store, self.beat_store = (
            dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(2)
        )
        self.alone = None  # the reason with which it has left a job that goes on
        self.ended = None  # the End with which it has ended the job

    def leave_alone(self, why):
        self.alone = why
        raise SystemExit

    def end(self, end):
        self.ended = end


@pytest.fixture
def group():
    """Return a function that makes a group of ranks."""
    server = meeting.store_on(socket.create_server(("127.0.0.1", 0)))

    def make(world_size, on_lost="stop"):
        server.set(ending.LOSSES, ending.NO_LOSSES)
        return [Rank(rank, world_size, server.port, on_lost) for rank in range(world_size)]

    yield make
    for number in range(1, 4):  # release threads that still wait after a test has failed
        for rank in range(3):
            server.set(f"meeting{number}/{rank}", "")


def start(function, *arguments):
    """Call the function on a new thread, because the test's deadline cannot interrupt a wait in C++."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def is_over(thread):
    thread.join(SOON)
    return not thread.is_alive()


def is_waiting(thread):
    thread.join(0.1)
    return thread.is_alive()


def test_each_meeting_waits_for_all(group):
    first, second = group(2)
    for _ in range(2):
        waiting = start(first.wait_for_all)
        assert is_waiting(waiting)
        assert is_over(start(second.wait_for_all))
        assert is_over(waiting)


def test_a_lost_rank_is_waited_for_no_longer(group):
    first, second, third = group(3)
    first_waits, second_waits = start(first.wait_for_all), start(second.wait_for_all)
    assert is_waiting(first_waits) and is_waiting(second_waits)
    for rank in (first, second):
        rank.take_losses({third.rank: "killed"})
    assert is_over(first_waits) and is_over(second_waits)
    assert first.lost == {2: "killed"}
    again = start(first.wait_for_all)  # and in later meetings
    assert is_over(start(second.wait_for_all))
    assert is_over(again)


def test_a_loss_is_told_once_and_a_rank_that_is_lost_itself_leaves(group, capsys):
    first, second, third = group(3, on_lost="continue")
    told, done = [], threading.Event()

    def lost(rank):
        told.append(rank)
        done.set()
        return "its work is thrown away"

    everybody = [start(first.on_lost, 1, lost), start(second.on_lost, 1), start(third.on_lost, 1)]
    assert all(map(is_over, everybody))
    first.drop(2, "killed")
    losses = ending.lost(first.beat_store)
    for _ in range(2):
        first.take_losses(losses)
    assert done.wait(SOON)
    with first.report_lock:  # when this lock is free, the line has been printed
        assert told == [2] and first.ended is None
    assert capsys.readouterr().err == "rl_rpc: lost rank 2 (worker2): killed; its work is thrown away\n"
    with pytest.raises(SystemExit):
        third.take_losses(losses)
    assert third.alone == "the others have gone on without it: killed"
    first.drop(1, "killed")  # the last worker
    assert first.ended == ending.End("lost", 1, "killed")
