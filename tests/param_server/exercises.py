"""What param_server/EXERCISES.md asks for and the package does not have: run where it is named, no test of its own."""

import json
import statistics

import pytest

from helpers import ROOT, load_module

judge = load_module(ROOT / "tests" / "param_server" / "test_equivalence.py")
one_thread_per_rank = judge.one_thread_per_rank
WEIGHTS = 1_199_882  # of the network: a push sends a gradient of as many, and as many weights come back
FLAGS = ("--mode", "replica", "--world_size", 2, "--transport", "tcp")


def train(folder, steps, *flags):
    """Train with one trainer; return (losses, weights, summary)."""
    summary = folder / "summary.json"
    losses, weights = judge.distributed(folder, steps, *FLAGS, "--summary_json", summary, *flags)
    return losses[1], weights, json.loads(summary.read_text())


def test_bfloat16_gradients(tmp_path):
    """Half the bytes on the way up, all of them on the way down; and it learns what it learns without."""
    losses, weights, summary = train(tmp_path, judge.STEPS)
    assert summary["wire_bytes_per_step"] < 1.1 * (2 + 4) * WEIGHTS
    expected_losses, expected = judge.one_process(judge.STEPS, batch_size=8)
    assert losses == pytest.approx(expected_losses, abs=0.02) and losses != expected_losses
    judge.assert_same_weights(weights, expected, tolerance=2e-3)


def test_largest_gradients(tmp_path):
    """A hundredth of the gradient on the way up; what is not sent is not lost, so it learns what it learns without."""
    steps = 100
    losses, _, summary = train(tmp_path, steps)
    assert summary["wire_bytes_per_step"] < 1.1 * (0.08 + 4) * WEIGHTS  # 4 bytes for a number, 4 for its place
    expected_losses, _ = judge.one_process(steps, batch_size=8)
    assert statistics.mean(losses[-20:]) == pytest.approx(statistics.mean(expected_losses[-20:]), abs=0.06)
