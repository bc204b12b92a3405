"""What all packages have in common on a GPU that their ranks share.  Skipped, saying so, where there is none.

The equivalences of rnn_rpc and param_server on a GPU are in test_rnn_cuda.py and test_ps_cuda.py.
"""

import os
import re
import signal
import time

import pytest
import torch

from helpers import PACKAGES, ROOT, load_module, run_main, run_script
from jobs import JOBS, Job

equivalence = load_module(ROOT / "tests" / "ddp_rpc" / "test_equivalence.py")
FLAGS, largest_difference, one_process = equivalence.FLAGS, equivalence.largest_difference, equivalence.one_process
DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]
# About 2,000 iterations each.
LONG_RUNS = {
    "rl_rpc": ["--mode", "batched", "--max_episodes", "60", "--eval_episodes", "0", "--reward_threshold", "1e9"],
    "rnn_rpc": ["--mode", "overlap", "--epochs", "20", "--corpus_tokens", "80000"],
    "ddp_rpc": ["--mode", "sync", "--epochs", "10", "--batches", "200"],
    "param_server": ["--dataset", "synthetic", "--mode", "remote", "--epochs", "4", "--max_batches", "250"],
}


def final_state(package, path, *flags, env=None):
    done = run_main(package, *flags, "--device", DEVICE, "--checkpoint", path, timeout=250, env=env)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return torch.load(path, weights_only=True, map_location="cpu")["state"]


@pytest.mark.parametrize("wire", ["direct", "cpu"])
@pytest.mark.parametrize("mode", ["sync", "averaged", "pipelined"])
def test_ddp_rpc_equals_one_process_on_the_cpu(tmp_path, mode, wire):
    """1e-4: a GPU adds up in another order."""
    trainers = 2 if mode == "averaged" else 1
    flags = ("--mode", mode, "--num_trainers", trainers, "--num_servers", 2, "--wire", wire)
    state = final_state("ddp_rpc", tmp_path / "end.pt", *FLAGS, *flags)
    expected = one_process(trainers, stale_lookups=mode == "pipelined")
    assert largest_difference((state["table"], state["fc"]), expected) < 1e-4


@pytest.mark.parametrize(
    ("package", "flags"),
    [
        ("ddp_rpc", [*FLAGS, "--mode", "averaged"]),
        ("ddp_rpc", [*FLAGS, "--mode", "pipelined", "--num_trainers", 1]),
        *(("rl_rpc", ["--mode", m, "--max_episodes", 10, "--eval_episodes", 0]) for m in ("batched", "rollout")),
    ],
)
def test_launch_blocking_changes_nothing(tmp_path, package, flags):
    """A tensor that is read on one stream before another has written it would make a difference."""
    free, blocking = (
        final_state(package, tmp_path / f"{value}.pt", *flags, env={"CUDA_LAUNCH_BLOCKING": value}) for value in "01"
    )
    tensors = [(free[key], blocking[key]) for key in ("table", "fc", "policy") if key in free]
    assert tensors
    for one, other in tensors:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_rank_killed_under_gpu_traffic_ends_the_job(package):
    with Job(package, "spawned", [*JOBS[package]["long"], "--device", DEVICE]) as job:
        assert job.wait_for_text(JOBS[package]["training"], 120)
        os.kill(job.pid_of(len(job.names) - 1), signal.SIGKILL)
        killed = time.monotonic()
        assert job.wait(15) == [1], job.text()
        assert time.monotonic() - killed < 15 and not job.survivors()
        assert f"({job.names[-1]})" in job.errors() and "Traceback" not in job.errors(), job.errors()


@pytest.mark.parametrize("package", PACKAGES)
def test_gpu_memory_stays_flat(package):
    size = JOBS[package]["size"]
    done = run_script(
        "tests/harness/cuda_memory.py", package, *size, *LONG_RUNS[package], "--device", DEVICE, timeout=280
    )
    assert done.returncode == 0, done.stderr
    held = re.findall(r"^memory rank \d+: ([\d.]+) ([\d.]+)$", done.stdout, re.M)
    assert len(held) == int(size[1]), done.stdout
    assert all(float(end) - float(half) <= 4 for half, end in held), held
