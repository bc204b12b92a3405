"""The checks of exercises 3 and 4 in param_server/EXERCISES.md.

The package does not have what they ask for. So these tests are not part of the test suite: only the exercises run them.
"""

import json
import statistics

import pytest

from helpers import ROOT, load_module

equivalence = load_module(ROOT / "tests" / "param_server" / "test_equivalence.py")
one_thread_per_rank = equivalence.one_thread_per_rank
WEIGHTS = 1_199_882  # of the network: a push sends as many gradients, and gets as many weights
FLAGS = ("--mode", "replica", "--world_size", 2, "--transport", "tcp")


def train(folder, steps, *flags):
    """Train with one trainer; return (losses, weights, summary)."""
    summary = folder / "summary.json"
    losses, weights = equivalence.distributed(folder, steps, *FLAGS, "--summary_json", summary, *flags)
    return losses[1], weights, json.loads(summary.read_text())


def test_bfloat16_gradients(tmp_path):
    """Gradients have half the bytes, weights have all of them, and the losses are nearly the same."""
    losses, weights, summary = train(tmp_path, equivalence.STEPS)
    assert summary["wire_bytes_per_step"] < 1.1 * (2 + 4) * WEIGHTS
    expected_losses, expected = equivalence.one_process(equivalence.STEPS, batch_size=8)
    assert losses == pytest.approx(expected_losses, abs=0.02) and losses != expected_losses
    equivalence.assert_same_weights(weights, expected, tolerance=2e-3)


def test_largest_gradients(tmp_path):
    """A hundredth of each gradient is sent at once, the rest later, and the losses are nearly the same."""
    steps = 100
    losses, _, summary = train(tmp_path, steps)
    assert summary["wire_bytes_per_step"] < 1.1 * (0.08 + 4) * WEIGHTS  # 4 bytes for a number, 4 for its position
    expected_losses, _ = equivalence.one_process(steps, batch_size=8)
    assert statistics.mean(losses[-20:]) == pytest.approx(statistics.mean(expected_losses[-20:]), abs=0.06)
