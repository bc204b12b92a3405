"""The supervisor of a job, over real connections of this process: who may join, who is lost, when all go on."""

import concurrent.futures
import contextlib
import socket
import threading
import time

import pytest

from helpers import package_on_path

with package_on_path("rl_rpc"):
    from glue import supervisor
    from glue.ending import End
    from glue.supervisor import DONE, Link, Supervisor

NAMES = ["rank 0 (agent)", "rank 1 (observer1)", "rank 2 (observer2)"]
FLAGS = {"seed": 1}
pytestmark = pytest.mark.timeout(30)  # a message that does not come is waited for without end


@pytest.fixture
def job():
    """Yield (a Supervisor of three ranks, a function that connects to it)."""
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)

        def connect():
            link = Link(socket.create_connection(listener.getsockname()))
            stack.callback(link.close)
            return link

        yield Supervisor(len(NAMES), FLAGS, {"id": "j"}, listener), connect


def join(connect, rank, flags=FLAGS, host="h"):
    link = connect()
    link.send({"join": rank, "must_match": flags, "host": host, "pid": 100 + rank, "gpus": 0})
    return link


def refusal(link):
    end = link.receive()["end"]
    assert end["status"] == 2
    return end["why"]


def wait_for(link, reached):
    """Return the first state that this rank is told for which reached(state) is true; None if there is none."""
    with contextlib.suppress(ConnectionError):
        while not reached(state := link.receive()):
            pass
        return state


def test_all_ranks_learn_who_is_missing_and_then_what_the_job_is(job):
    _, connect = job
    first = join(connect, 2)
    assert first.receive()["missing"] == [0, 1]
    others = [join(connect, rank) for rank in (0, 1)]
    for link in (first, *others):
        told = wait_for(link, lambda state: not state["missing"])["job"]
        assert told["id"] == "j" and [rank["pid"] for rank in told["ranks"]] == [100, 101, 102]


def test_a_rank_with_other_flags_or_a_number_that_is_taken_is_refused(job):
    _, connect = job
    assert join(connect, 1).receive()["missing"] == [0, 2]
    assert refusal(join(connect, 1)) == "refused, because this rank has joined already, as process 101 on h"
    for number in (3, -1, True, 1.0):
        assert refusal(join(connect, number)) == f"refused, because this job has no rank {number}"
    assert refusal(join(connect, 2, {"seed": 7})) == "refused, because it was started with seed 7, and this job with 1"
    assert join(connect, 2).receive()["end"] is None


def test_closing_the_supervisor_wakes_the_thread_that_accepts():
    before = {*threading.enumerate()}
    overseer = Supervisor(1, FLAGS, {"id": "j"}, socket.create_server(("127.0.0.1", 0)))
    (accepting,) = {*threading.enumerate()} - before
    stranger = socket.create_connection(overseer.listener.getsockname())
    stranger.sendall(b"[]\n")
    assert stranger.recv(1) == b""  # so the thread has accepted this connection, and waits for the next one
    overseer.close()
    accepting.join(10)
    stranger.close()
    assert not accepting.is_alive()


GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", b'{"join": 1}\n', b"[]\n", b"\xff\xfe\n", b"", b"[" * 60_000 + b"\n"]
GARBAGE += [  # who knows the flags of the job, but does not say who he is
    b'{"join": 1, "must_match": {"seed": 1}, "pid": 1, "gpus": 0}\n',
    b'{"join": 1, "must_match": {"seed": 1}, "host": "h", "pid": 1, "gpus": "two"}\n',
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_stranger_does_not_disturb_the_job(job, garbage):
    _, connect = job
    stranger = connect()
    stranger.connection.sendall(garbage)
    stranger.connection.shutdown(socket.SHUT_WR)
    assert stranger.connection.recv(100) == b""
    assert join(connect, 1).receive()["missing"] == [0, 2]


def test_a_line_without_an_end_is_cut_off(job):
    """A hundred strangers may be connected. What a rank sends may be longer, such as a long error."""
    overseer, connect = job
    stranger = connect()
    while not overseer.strangers:
        time.sleep(0.01)
    (link,) = overseer.strangers
    with pytest.raises(ConnectionError):
        while len(link.received) < 1 << 20:
            stranger.connection.send(b"x" * 100_000)
    assert len(link.received) <= 1 << 17
    rank = join(connect, 1)
    assert rank.receive()["missing"] == [0, 2]
    rank.send({"failed": vars(End(1, "x" * 300_000))})
    assert len(wait_for(rank, lambda state: state["end"])["end"]["why"]) == 300_000


NO_RANK = {"rank": 99, "why": "nonsense"}


@pytest.mark.parametrize("nonsense", [{"at": "here"}, {"at": None}, {"failed": 1}, {"failed": NO_RANK}, 1])
def test_a_rank_that_sends_nonsense_is_lost(job, nonsense):
    _, connect = job
    links = [join(connect, rank) for rank in range(3)]
    links[1].send(nonsense)
    assert wait_for(links[0], lambda state: state["end"])["end"]["rank"] == 1


def test_all_go_on_when_the_last_has_come(job):
    _, connect = job
    links = [join(connect, rank) for rank in range(3)]
    for link in links[:2]:
        link.send({"at": 1})
    assert wait_for(links[0], lambda state: not state["missing"])["passed"] == 0
    links[2].send({"at": 1})
    for link in links:
        wait_for(link, lambda state: state["passed"] == 1)


def test_the_end_of_a_connection_ends_the_job_and_is_the_only_reason(job):
    overseer, connect = job
    links = [join(connect, rank) for rank in range(3)]
    links[1].close()
    end = wait_for(links[0], lambda state: state["end"])["end"]
    assert (end["rank"], end["why"]) == (1, supervisor.ENDED)
    links[0].send({"failed": vars(End(0, "ValueError"))})
    links[0].send({"at": DONE})
    with overseer.changed:
        assert overseer.changed.wait_for(lambda: overseer.at[0] == DONE, 10)
    assert overseer.end == End(1, supervisor.ENDED)


def join_with_workers(connect):
    """Let three ranks join, and tell that the job can go on without ranks 1 and 2; return their Links."""
    links = [join(connect, rank) for rank in range(3)]
    for link in links:
        link.send({"at": 1, "can_lose": True})
    return links


def test_the_job_goes_on_without_workers_until_the_last(job):
    _, connect = job
    links = join_with_workers(connect)
    wait_for(links[0], lambda state: state["passed"] == 1)
    links[0].send({"failed": vars(End(2, "KeyError: 'x'"))})
    links[0].send({"at": 2})
    links[1].send({"at": 2})
    state = wait_for(links[0], lambda state: state["passed"] == 2)
    assert state["lost"] == [[2, "KeyError: 'x'"]] and state["end"] is None
    links[1].close()
    assert wait_for(links[0], lambda state: state["end"])["end"]["rank"] == 1


def test_the_job_does_not_go_on_without_a_rank_that_is_no_worker(job):
    _, connect = job
    links = join_with_workers(connect)
    wait_for(links[1], lambda state: state["passed"] == 1)
    links[0].close()
    state = wait_for(links[1], lambda state: state["end"])
    assert (state["end"]["rank"], state["lost"]) == (0, [])


def test_a_silent_rank_is_lost(job, monkeypatch):
    """A rank that is alive has thirty times the time that it needs, so it is not lost on a busy machine."""
    monkeypatch.setattr(supervisor, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "LOST_AFTER_SECONDS", 1.5)
    _, connect = job
    links = [join(connect, rank) for rank in range(3)]
    with concurrent.futures.ThreadPoolExecutor() as threads:  # only a rank that listens is alive
        end, _ = threads.map(lambda link: wait_for(link, lambda state: state["end"])["end"], links[:2])
    assert end["rank"] == 2 and end["why"].startswith("silent for 2 s (")  # rounded


def test_silence_is_counted_from_the_last_sign_of_life(monkeypatch):
    monkeypatch.setattr(supervisor, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "LOST_AFTER_SECONDS", 1.2)
    ours, theirs = map(Link, socket.socketpair())

    def live():
        for _ in range(5):
            time.sleep(0.4)
            theirs.send()
        theirs.send({"at": 1})

    with contextlib.closing(ours), contextlib.closing(theirs):
        threading.Thread(target=live, daemon=True).start()
        assert ours.receive() == {"at": 1}


def test_an_error_that_a_loss_may_have_caused_waits_for_the_loss(job, monkeypatch):
    monkeypatch.setattr(supervisor, "KNOWN_AFTER_SECONDS", 1.0)
    _, connect = job
    links = [join(connect, rank) for rank in range(3)]
    links[0].send({"failed": vars(End(0, "RuntimeError: eof", trouble=True))})
    links[1].close()
    end = wait_for(links[2], lambda state: state["end"])["end"]
    assert (end["rank"], end["why"]) == (1, supervisor.ENDED)


def test_an_error_that_no_loss_has_caused_is_the_reason(job, monkeypatch):
    monkeypatch.setattr(supervisor, "KNOWN_AFTER_SECONDS", 0.2)
    _, connect = job
    links = [join(connect, rank) for rank in range(3)]
    links[0].send({"failed": vars(End(0, "RuntimeError: timed out", trouble=True))})
    assert wait_for(links[2], lambda state: state["end"])["end"]["why"] == "RuntimeError: timed out"


def test_a_rank_that_does_not_read_holds_up_nobody(job, monkeypatch):
    """The states are so long that the buffers of the system cannot hold all that it does not read.

    Whoever waited until it reads would wait for longer than this test may take.
    """
    monkeypatch.setattr(supervisor, "LOST_AFTER_SECONDS", 1000)
    _, connect = job
    links = [join(connect, rank, host="h" * 20_000) for rank in range(3)]
    for number in range(1, 300):
        for link in links:
            link.send({"at": number})
        wait_for(links[0], lambda state, number=number: state["passed"] == number)
