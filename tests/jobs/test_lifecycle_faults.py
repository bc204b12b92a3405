"""If a rank dies, the job ends: in every package, however it was started, in any role, at any moment, in any way.

`python tools/soak_faults.py` runs hundreds of such cases.
"""

import pytest

from faults import case_id, draw_case, run_case
from jobs import JOBS, RunningJob

QUICK = [
    ("rl_rpc", "spawned", 1, "SIGKILL", "training", 0.5),
    ("ddp_rpc", "spawned", 1, "exception", "training", 0.5),  # trainer1 waits for trainer2 in an allreduce
    ("rl_rpc", "terminals", 0, "SIGKILL", "training", 0.5),  # the rank that has the supervisor
]
FULL = [
    ("rl_rpc", "spawned", 2, "SIGSTOP", "training", 1.0),
    ("ddp_rpc", "spawned", 0, "SIGKILL", "start", 1.1),
    ("param_server", "terminals", 1, "SIGSTOP", "training", 2.0),
    ("ddp_rpc", "terminals", 2, "SIGKILL", "end", 1.4),
    ("ddp_rpc", "torchrun", 0, "SIGKILL", "training", 1.0),
    ("ddp_rpc", "terminals", 0, "served exit", "training", 0.5),
    *(draw_case(number) for number in (6, 11)),
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", QUICK, ids=case_id)
def test_a_death_ends_the_job(case):
    run_case(*case)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", FULL, ids=case_id)
@pytest.mark.draw(2)
def test_a_death_ends_the_job_more_cases(case):
    run_case(*case)


@pytest.mark.slow
def test_a_rank_that_is_stopped_as_it_leaves_is_not_waited_for():
    """The other ranks have ended with status 0, so only the starting process can notice it."""
    with RunningJob("rl_rpc", "spawned", JOBS["rl_rpc"]["short"], fault=(1, "stop", 0)) as job:
        assert job.wait(60) == [1], job.text()
        assert job.errors().startswith("rl_rpc: lost rank 1 (observer1): "), job.errors()
        assert not job.survivors()
