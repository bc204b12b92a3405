"""No rank of a program in one file outlives the process that spawned it, at whatever moment that is killed."""

import random
import signal
import time

import pytest

import sampling
from jobs import free_port
from programs import Program

PROGRAMS = ["rl_rpc/tutorial.py", "rnn_rpc/tutorial.py", "ddp_rpc/tutorial.py", "docs/primer.py"]
SYNTHETIC = {"param_server/tutorial.py": ["--dataset", "synthetic", "--world_size", "2"]}


@pytest.mark.slow
@pytest.mark.parametrize("path", [*PROGRAMS, "rl_rpc/tutorial_batch.py", "param_server/tutorial_batch.py", *SYNTHETIC])
@pytest.mark.draw(2)
def test_ranks_end_with_the_process_that_spawned_them(path):
    """Its ranks import torch during the first seconds, and torch asks for a signal at its death only afterwards."""
    with Program(path, "--master_port", free_port(), *SYNTHETIC.get(path, []), cold=True) as program:
        deadline = time.monotonic() + 60
        while len(program.members()) < 3:  # itself, and at least two that it has started
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(random.Random(f"{sampling.SEED} {path}").uniform(0, 2))  # the moment of this run
        program.send_signal(signal.SIGKILL)
        program.wait()
        deadline = time.monotonic() + 45  # imports of torch on a busy machine
        while left := program.members():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
