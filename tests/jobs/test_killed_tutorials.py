"""No rank of a program in one file outlives the process that spawned it. test_signals.py has main.py's."""

import signal
import time

from jobs import free_port
from programs import Program


def test_ranks_end_with_the_process_that_spawned_them():
    """Its ranks import torch during the first seconds, and torch asks for a signal at its death only afterwards."""
    with Program("rl_rpc/tutorial.py", "--master_port", free_port()) as program:
        deadline = time.monotonic() + 60
        while len(program.members()) < 3:  # itself, and at least two that it has started
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        program.send_signal(signal.SIGKILL)
        program.wait()
        left = program.left_over(45)  # imports of torch on a busy machine
        assert not left, left
