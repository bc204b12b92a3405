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
WEIGHTS = 1_199_882  # of the network: a trainer gets as many weights, and sends as many gradients


def train(folder, data_dir, steps):
    """Train with one trainer; return (losses, weights, bytes on the wire per step)."""
    runs = []

    def run_counted(bench, *flags):
        runs.append(run_script(bench, "param_server", *flags))
        return runs[-1]

    flags = ("--mode", "replica", "--world_size", 2, "--batch_size", 8, "--max_batches", steps)
    _, losses, weights = oracle.distributed(folder, data_dir, *flags, main="bench/bytes_per_step.py", run=run_counted)
    return losses[1], weights, BYTES.per_step(runs[0].stdout)


def train_in_one_process(data_dir, steps):
    return oracle.train(oracle.updates_of_one_process(steps), data_dir, batch_size=8)


def test_bfloat16_gradients(tmp_path, few_digits):
    """Gradients have half the bytes, weights have all of them, and the losses are nearly the same."""
    losses, weights, sent = train(tmp_path, few_digits, oracle.STEPS)
    assert sent < 1.1 * (2 + 4) * WEIGHTS
    expected_losses, expected = train_in_one_process(few_digits, oracle.STEPS)
    assert losses == pytest.approx(expected_losses, abs=0.02) and losses != expected_losses
    oracle.assert_same_weights(weights, expected, tolerance=2e-3)


def test_largest_gradients(tmp_path, few_digits):
    """A hundredth of each gradient is sent at once, the rest later, and the losses are nearly the same."""
    steps = 100
    losses, _, sent = train(tmp_path, few_digits, steps)
    assert sent < 1.1 * (0.12 + 4) * WEIGHTS  # 4 bytes for a number, 8 for its position
    expected_losses, _ = train_in_one_process(few_digits, steps)
    assert statistics.mean(losses[-20:]) == pytest.approx(statistics.mean(expected_losses[-20:]), abs=0.06)
