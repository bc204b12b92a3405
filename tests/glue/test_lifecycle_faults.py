"""Any death ends the job: for every package and way of starting, any role, any moment, any kind of death.

`python tests/tools/soak_faults.py` draws such cases by the hundred.
"""

import pytest

from faults import case_id, draw_case, run_case

QUICK, FULL = range(6), [number for number in range(6, 25) if number != 22]  # 22: torchrun takes a minute, as for 20


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [draw_case(number) for number in QUICK], ids=case_id)
def test_a_death_ends_the_job(case):
    run_case(*case)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [draw_case(number) for number in FULL], ids=case_id)
def test_a_death_ends_the_job_more_cases(case):
    run_case(*case)
