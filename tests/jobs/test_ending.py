"""How a job ends (ending.py): the End, and the line that each rank prints. These tests start no processes."""

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from helpers import package_on_path

with package_on_path("rl_rpc"):
    from glue import UserError, ending
    from glue.ending import End

NAMES = ["rank 0 (agent)", "rank 1 (observer1)", "rank 2 (observer2)"]
SILENT = "silent for 8 s (stopped, or unreachable)"


@pytest.mark.parametrize(
    "end, me, said",
    [
        (End(1, SILENT), 2, f"rank 2 (observer2): lost rank 1 (observer1): {SILENT}"),
        (End(1, SILENT), None, f"lost rank 1 (observer1): {SILENT}"),  # in the starting process
        (End(None, "lost the starting process: broke"), 1, "rank 1 (observer1): lost the starting process: broke"),
        (End(1, SILENT), 1, f"rank 1 (observer1): {SILENT}"),  # it continues after the others have lost it
    ],
)
def test_the_line_that_a_rank_prints(end, me, said):
    assert end.line(NAMES, me) == said


@pytest.mark.parametrize("number, status", [(2, 130), (15, 143), (1, 129)])
def test_a_signal_gives_the_exit_status_that_a_shell_would_show(number, status):
    assert ending.interrupted(number).status == status and not ending.interrupted(number).again
    assert End(0, "").status == 1


REMOTE = """On WorkerInfo(id=2, name=observer2):
KeyError('x')
Traceback (most recent call last):
  File "observer.py", line 3, in step
    return table[key]
KeyError: 'x'
"""


class Unspeakable(Exception):
    def __str__(self):
        raise KeyError("no text")


@pytest.mark.parametrize(
    "error, rank, why, again",
    [
        (UserError("a bad\nfile"), 0, "a bad file", False),
        (ValueError("no\nnumber"), 0, "ValueError: no number", True),
        (RuntimeError("eof Exception raised from readLoop at x.cpp:1 frame #0: f"), 0, "RuntimeError: eof", True),
        (RuntimeError(REMOTE), 2, "KeyError: 'x'", True),
        (ValueError(REMOTE.replace("KeyError", "glue.UserError")), 2, "'x'", False),
        (Unspeakable(), 0, "Unspeakable: <exception str() failed>", True),
        (SystemExit(0), 0, "it called sys.exit(0) before its work was done", True),
    ],
)
def test_what_an_exception_says_of_the_jobs_end(error, rank, why, again):
    end = ending.of_exception(error, 0)
    assert (end.rank, end.why, end.again) == (rank, why, again)


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
    """Only for these errors a rank waits some seconds for the name of the lost rank; it prints all others at once."""
    assert ending.of_exception(error, 0).trouble == trouble


def test_a_loss_is_a_loss_wherever_it_is_noticed():
    """If a peer dies while a checkpoint is loaded, the ValueError is not a mistake of the user's."""
    try:
        try:
            raise RuntimeError("eof (this error originated at tensorpipe/transport/shm/connection_impl.cc:259)")
        except RuntimeError as error:
            raise ValueError("cannot go on from c.pt") from error
    except ValueError as error:
        assert ending.of_exception(error, 0).trouble
