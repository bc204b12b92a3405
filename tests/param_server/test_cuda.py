"""param_server on a GPU that all ranks share.  Skipped, saying so, where there is none."""

import json
import os
import signal

import pytest
import torch

from helpers import ROOT, load_module, package_on_path, run_main, start_main
from jobs import ranks_of

one_process = load_module(ROOT / "tests" / "param_server" / "test_equivalence.py").one_process
runs = load_module(ROOT / "tests" / "param_server" / "test_runs.py")
MODES, wait_for = runs.MODES, runs.wait_for
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]
EXACT = ("--dataset", "synthetic", "--no_dropout", "--batch_size", "8", "--max_batches", "20", "--device", "cuda")


def final_weights(tmp_path, *flags, env=None):
    checkpoint = tmp_path / "end.pt"
    done = run_main("param_server", *EXACT, "--checkpoint", checkpoint, *flags, timeout=200, env=env)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return torch.load(checkpoint, weights_only=True, map_location="cpu")["state"]["model"]


@pytest.mark.parametrize("wire", ["direct", "cpu"])
@pytest.mark.parametrize("mode", ["remote", "async"])
def test_one_trainer_equals_one_process_on_the_cpu(tmp_path, mode, wire):
    weights = final_weights(tmp_path, *MODES[mode], "--world_size", 2, "--wire", wire)
    _, expected = one_process(20, batch_size=8)
    for name in expected:  # TF32 is off by default: only the order of additions differs
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-4)


def test_sync_equals_one_process_on_the_joined_batch(tmp_path):
    weights = final_weights(tmp_path, *MODES["sync"], "--world_size", 3)
    _, expected = one_process(20, batch_size=16)
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["remote", "async"])
def test_launch_blocking_changes_nothing(tmp_path, mode):
    """A missing wait between streams would show as a difference."""
    flags = (*MODES[mode], "--world_size", 2)
    free, blocking = (final_weights(tmp_path, *flags, env={"CUDA_LAUNCH_BLOCKING": str(b)}) for b in (0, 1))
    for name in free:
        torch.testing.assert_close(free[name], blocking[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["remote", "async", "bounded", "sync"])
def test_every_mode_learns(tmp_path, mode):
    summary = tmp_path / "s.json"
    done = run_main(
        "param_server",
        "--dataset",
        "synthetic",
        "--device",
        "cuda",
        *MODES[mode],
        "--world_size",
        4,
        "--max_batches",
        100,
        "--summary_json",
        summary,
        timeout=200,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert json.loads(summary.read_text())["test_accuracy"] > 0.8


def test_the_tutorials_own_setting_trainers_on_the_cpu_and_the_network_on_gpus(tmp_path):
    """`--num_gpus` without `--device cuda`: images and predictions are staged through the CPU."""
    gpus = min(2, torch.cuda.device_count())
    done = run_main("param_server", "--dataset", "synthetic", "--num_gpus", gpus, "--max_batches", 20, timeout=200)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_a_trainer_killed_while_cuda_tensors_are_in_flight(tmp_path):
    checkpoint = tmp_path / "c.pt"
    process = start_main(
        "param_server",
        "--dataset",
        "synthetic",
        "--device",
        "cuda",
        "--mode",
        "replica",
        "--epochs",
        50,
        "--checkpoint",
        checkpoint,
        "--checkpoint_every",
        20,
    )
    wait_for(checkpoint.exists, 100, process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 1 and "trainer_1" in err, (out, err)


def test_memory_stays_flat_over_2000_updates():
    with package_on_path("param_server"):
        import main
        import replica_server
    args = main.parse_args(["--dataset", "synthetic", "--device", "cuda", "--mode", "replica", "--world_size", "2"])
    server = replica_server.RangeServer(args, 0)
    gradient = torch.zeros_like(server.weights).detach()
    used = []
    for step in range(2_000):
        server.push(1, step, gradient, 4, 1).wait()
        if step % 500 == 100:
            used.append(torch.cuda.memory_allocated())
    assert max(used) == min(used)
