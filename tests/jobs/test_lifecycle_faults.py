"""If a rank is killed, the job ends: however it was started, in any role, at any moment.

`python tools/soak_faults.py` runs hundreds of such cases. test_memory.py kills ranks of ddp_rpc and param_server, and
test_own_errors.py one of rl_rpc.
"""

import pytest

from faults import case_id, run_case
from helpers import assert_one_line_error
from patches import main_with
from programs import run_script


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(("rnn_rpc", "terminals", 0, "training", 0.5), marks=pytest.mark.quick),
        ("ddp_rpc", "spawned", 0, "start", 1.1),
        ("rnn_rpc", "spawned", 1, "end", 1.4),
    ],
    ids=case_id,
)
def test_a_death_ends_the_job(case):
    run_case(*case)


def rank_1_dies(program, os, signal):
    run_rank = program.launch.run_rank

    def run_or_die(rank, *arguments):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run_rank(rank, *arguments)

    program.launch.run_rank = run_or_die


def test_a_rank_that_dies_while_others_are_still_being_started_is_named(tmp_path):
    """Python's multiprocessing itself takes its exit code then."""
    done = run_script(main_with("rl_rpc", tmp_path, rank_1_dies), "--world_size", 8, timeout=60)
    assert_one_line_error(done, 1, "lost rank 1 (observer1): killed by SIGKILL")
