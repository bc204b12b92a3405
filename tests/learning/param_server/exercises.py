"""The checks of exercises 3 and 4 in docs/exercises/param_server.md.

The package does not have what they ask for. So these tests are not part of the test suite: only the exercises run them.
"""

import statistics

import pytest

from helpers import load_bench, load_oracle
from programs import run_script

oracle = load_oracle("param_server")
BYTES = load_bench("bytes_per_step")
full_precision = oracle.full_precision
WEIGHTS = 1_199_882  # of the network: a push sends as many gradients, and gets as many weights
FLAGS = ("--mode", "replica", "--world_size", 2)


def train(folder, steps, *flags):
    """Train with one trainer; return (losses, weights, bytes on the wire per step)."""
    runs = []

    def run_counted(*words, timeout):
        runs.append(run_script("bench/bytes_per_step.py", *words, timeout=timeout))
        return runs[-1]

    losses, weights = oracle.distributed(folder, steps, *FLAGS, *flags, run=run_counted)
    return losses[1], weights, BYTES.per_step(runs[-1].stdout)


def test_bfloat16_gradients(tmp_path):
    """Gradients have half the bytes, weights have all of them, and the losses are nearly the same."""
    losses, weights, sent = train(tmp_path, oracle.STEPS)
    assert sent < 1.1 * (2 + 4) * WEIGHTS
    expected_losses, expected = oracle.one_process(oracle.STEPS, batch_size=8)
    assert losses == pytest.approx(expected_losses, abs=0.02) and losses != expected_losses
    oracle.assert_same_weights(weights, expected, tolerance=2e-3)


def test_largest_gradients(tmp_path):
    """A hundredth of each gradient is sent at once, the rest later, and the losses are nearly the same."""
    steps = 100
    losses, _, sent = train(tmp_path, steps)
    assert sent < 1.1 * (0.08 + 4) * WEIGHTS  # 4 bytes for a number, 4 for its position
    expected_losses, _ = oracle.one_process(steps, batch_size=8)
    assert statistics.mean(losses[-20:]) == pytest.approx(statistics.mean(expected_losses[-20:]), abs=0.06)
