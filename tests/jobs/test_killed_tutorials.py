"""No rank of a program in one file outlives the process that spawned it, at whatever moment that is killed."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from jobs import free_port
from processes import session_members
from programs import ROOT

PROGRAMS = ["rl_rpc/tutorial.py", "rnn_rpc/tutorial.py", "ddp_rpc/tutorial.py", "docs/primer.py"]
SYNTHETIC = {"param_server/tutorial.py": ["--dataset", "synthetic", "--world_size", "2"]}


@pytest.mark.slow
@pytest.mark.parametrize("path", [*PROGRAMS, "rl_rpc/tutorial_batch.py", "param_server/tutorial_batch.py", *SYNTHETIC])
@pytest.mark.draw(2)
def test_ranks_end_with_the_process_that_spawned_them(path):
    """Its ranks import torch during the first seconds, and torch asks for a signal at its death only afterwards."""
    seed = random.SystemRandom().randrange(1000)
    command = [sys.executable, str(ROOT / path), "--master_port", str(free_port()), *SYNTHETIC.get(path, [])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(session_members(process.pid)) < 3:  # itself, and at least two that it has started
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(random.Random(seed).uniform(0, 2))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 45  # imports of torch on a busy machine
    while left := session_members(process.pid):
        assert time.monotonic() < deadline, (seed, left)
        time.sleep(0.05)
