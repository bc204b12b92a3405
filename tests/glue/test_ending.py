"""How a job ends (ending.py): the End, and the line that each rank prints.  These tests start no processes."""

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from helpers import package_on_path

with package_on_path("rl_rpc"):
    from glue import UserError, ending
    from glue.ending import STORE_HOLDER, End

NAMES = ["rank 0 (agent)", "rank 1 (observer1)", "rank 2 (observer2)"]
SILENT = "silent for 8 s (killed, stopped, or unreachable)"


@pytest.mark.parametrize(
    "end, me, spawned, said",
    [
        (End("lost", 1, SILENT), 2, True, f"rank 2 (observer2): lost rank 1 (observer1): {SILENT}"),
        # the process that holds the store has a description instead of a rank
        (End("lost", STORE_HOLDER, "broke"), 1, True, "rank 1 (observer1): lost the starting process: broke"),
        # a stopped rank that continues after the others have lost it
        (End("lost", 1, SILENT), 1, False, f"rank 1 (observer1): {SILENT}"),
        (End("failed", 0, "ValueError: no"), 0, True, "rank 0 (agent): ValueError: no"),
        (End("failed", 1, "ValueError: no"), 2, True, "rank 2 (observer2): lost rank 1 (observer1): ValueError: no"),
        # an error of the user's takes one line in a terminal
        (End("failed", 1, "bad file", again=False), 1, True, "rank 1 (observer1): bad file"),
        (End("failed", 1, "bad file", again=False), 0, True, None),
        (End("failed", 1, "bad file", again=False), 0, False, "rank 0 (agent): lost rank 1 (observer1): bad file"),
        (End("missing", 0, "rank 2 (observer2) did not come"), 0, False,
         "rank 0 (agent): rank 2 (observer2) did not come"),
        (ending.interrupted(0, 2), 1, True, None),
    ],
)  # fmt: skip
def test_the_line_that_a_rank_prints(end, me, spawned, said):
    assert ending.line(end, me, NAMES, "the starting process", spawned) == said


@pytest.mark.parametrize("number, status", [(2, 130), (15, 143), (1, 129)])
def test_a_signal_gives_the_exit_status_that_a_shell_would_show(number, status):
    assert ending.interrupted(0, number).status == status and not ending.interrupted(0, number).again
    assert End("lost", 0, "").status == End("failed", 0, "").status == End("missing", 0, "").status == 1


REMOTE = """On WorkerInfo(id=2, name=observer2):
KeyError('x')
Traceback (most recent call last):
  File "observer.py", line 3, in step
    return table[key]
KeyError: 'x'
"""


@pytest.mark.parametrize(
    "error, rank, why, again",
    [
        (UserError("a bad\nfile"), 0, "a bad file", False),
        (ValueError("no\nnumber"), 0, "ValueError: no number", True),
        (RuntimeError("eof Exception raised from readLoop at x.cpp:1 frame #0: f"), 0, "RuntimeError: eof", True),
        (RuntimeError(REMOTE), 2, "KeyError: 'x'", True),
        (ValueError(REMOTE.replace("KeyError", "glue.UserError")), 2, "'x'", False),
        (SystemExit(0), 0, "it called sys.exit(0) before its work was done", True),
    ],
)
def test_what_an_exception_says_of_the_jobs_end(error, rank, why, again):
    assert ending.of_exception(error, 0) == End("failed", rank, why, again)


@pytest.mark.parametrize(
    "error, trouble",
    [
        (RuntimeError("eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)"), True),
        (RuntimeError("ECONNREFUSED: connection refused"), True),
        (RuntimeError("[1] is setting up NCCL communicator: TCPStore is gone"), True),
        (DistStoreError("wait failed"), True),
        (DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed."), True),
        (RuntimeError("RPC ran for more than set timeout (60000 ms) and will now be marked with an error"), True),
        (RuntimeError("Trying to resize storage that is not resizable"), False),
        (RuntimeError("cannot restore the state that was stored"), False),
        (ValueError("no connection to speak of"), False),
    ],
)
def test_an_error_that_a_vanished_peer_may_have_caused(error, trouble):
    """Only for these errors a rank waits some seconds for a missing heartbeat; it prints all others at once."""
    assert ending.is_connection_trouble(error) == trouble


def test_a_loss_is_a_loss_wherever_it_is_noticed():
    """If a peer dies while a checkpoint is loaded, the ValueError is not a mistake of the user's."""
    try:
        try:
            raise RuntimeError("eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)")
        except RuntimeError as error:
            raise ValueError("cannot go on from c.pt") from error
    except ValueError as error:
        assert ending.is_connection_trouble(error)


class Store(dict):
    def compare_set(self, key, expected, wanted):
        expected = expected.encode() if isinstance(expected, str) else expected
        if self.get(key, b"") == expected:
            self[key] = wanted.encode()
        return self[key]


def test_the_first_reason_given_is_the_reason():
    store = Store()
    first, second = End("lost", 1, SILENT), End("failed", 0, "RuntimeError: eof")
    assert ending.claim(store, first) == first
    assert ending.claim(store, second) == first == ending.read(store["end"])
    assert ending.read(b"-") is None


def test_the_job_goes_on_without_workers_until_the_last():
    store = Store()
    assert not ending.drop(store, 1, SILENT)  # can_go_on_without was not called yet
    ending.can_go_on_without(store, range(1, 4))
    assert ending.drop(store, 3, SILENT) and ending.drop(store, 1, "killed")
    assert ending.drop(store, 3, "killed"), "noticed before"
    assert not ending.drop(store, 0, SILENT) and not ending.drop(store, 2, SILENT)
    assert ending.lost(store) == ending.read_losses(store["losses"]) == {1: "killed", 3: SILENT}
