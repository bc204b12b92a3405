"""What all packages have in common on a GPU that their ranks share.  Skipped, saying so, where there is none.

The equivalences on a GPU stand beside those on the CPU, in each package's test_equivalence.py.
"""

import os
import re
import signal
import time

import pytest
import torch

from helpers import PACKAGES, run_script
from jobs import JOBS, Job

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
