"""If a rank is killed, the job ends: however it was started, in any role, at any moment.

`python tools/soak_faults.py` runs hundreds of such cases. test_memory.py kills ranks of ddp_rpc and param_server.
"""

import pytest

from faults import case_id, run_case

QUICK = [
    ("rl_rpc", "spawned", 1, "training", 0.5),
    ("rnn_rpc", "terminals", 0, "training", 0.5),
]
FULL = [
    ("ddp_rpc", "spawned", 0, "start", 1.1),
    ("rnn_rpc", "environment", 1, "end", 1.4),
]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.quick, id=case_id(case)) for case in QUICK),
        *(pytest.param(case, id=case_id(case)) for case in FULL),
    ],
)
def test_a_death_ends_the_job(case):
    run_case(*case)
