"""RPC sends a function by the name of its module. So what is called in another rank must not stand in main.py.

In a rank that a user's own program starts, `__main__` is that program, and has none of main.py's names.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from jobs import JOBS, free_port
from programs import run_script


@pytest.mark.parametrize(
    ("package", "called"),
    [("rl_rpc", 0), ("rl_rpc", 1), ("rnn_rpc", 0), ("ddp_rpc", 0), ("ddp_rpc", 3), ("param_server", 0)],
)
@pytest.mark.draw(3)
def test_a_rank_that_another_program_starts_is_called_like_the_others(package, called):
    """`called`: a rank whose functions other ranks call. Here another file starts it, and main.py starts the others."""
    place = ("--master_port", free_port(), "--rank")
    job = JOBS[package]

    def run(rank):
        program = [f"{package}/main.py"]
        if rank == called:
            program = ["tests/harness/faulty_main.py", package, rank, "none", 0]
        return run_script(*program, *job["size"], *job["short"], *place, rank)

    ranks = range(len(job["names"]))
    with ThreadPoolExecutor(len(ranks)) as together:
        done = list(together.map(run, ranks))
    assert [each.returncode for each in done] == [0] * len(ranks), [each.stderr for each in done]
