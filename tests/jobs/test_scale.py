"""Large groups on a small machine: they start, work and end."""

import pytest

from programs import run_main

SIZES = {
    "rl_rpc": lambda n: ["--world_size", n, "--max_episodes", 2, "--eval_episodes", 1],
    "ddp_rpc": lambda n: ["--world_size", n, "--epochs", 1, "--batches", 5],
}  # without a process group, and with one


@pytest.mark.slow
@pytest.mark.crowd
@pytest.mark.timeout(400)
@pytest.mark.parametrize("package", SIZES)
@pytest.mark.draw(2)
def test_a_large_group_starts_works_and_ends(package):
    done = run_main(package, *SIZES[package](32), timeout=380)
    assert (done.returncode, done.stderr) == (0, "")
