"""rnn_rpc on a GPU that all ranks share.  Skipped, saying so, where there is none."""

import os
import re
import signal
import time

import pytest
import torch

from helpers import ROOT, load_module, run_script, start_main
from jobs import ranks_of

equivalence = load_module(ROOT / "tests" / "rnn_rpc" / "test_equivalence.py")
SGD, assert_equal = equivalence.SGD, equivalence.assert_equal
distributed, one_process = equivalence.distributed, equivalence.one_process
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
]
FLAGS = ("--device", "cuda", "--lr", SGD["lr"], "--clip", SGD["clip"])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("wire", ["direct", "cpu"])
@pytest.mark.parametrize("mode", ["logits", "loss", "overlap"])
def test_equals_one_process_on_the_cpu(tmp_path, mode, wire, world_size):
    """1e-4: a GPU adds up in another order, 20 steps long."""
    found = distributed(tmp_path, *FLAGS, "--mode", mode, "--wire", wire, "--world_size", world_size)
    assert_equal(found, one_process(**SGD), tolerance=1e-4)


@pytest.mark.parametrize("mode", ["logits", "overlap"])
def test_streams_are_right(tmp_path, mode, monkeypatch):
    """A tensor read before its kernel has ended would differ from a run in which every launch waits for its end."""
    plain = distributed(tmp_path, *FLAGS, "--mode", mode)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    (tmp_path / "blocking").mkdir()
    assert_equal(plain, distributed(tmp_path / "blocking", *FLAGS, "--mode", mode), tolerance=1e-5)


def test_a_server_killed_under_gpu_traffic_ends_the_job():
    job = start_main("rnn_rpc", "--device", "cuda", "--epochs", 100_000, "--corpus_tokens", 20_000)
    for line in job.stdout:
        if line.startswith("epoch"):
            break
    (ps, _) = ranks_of(job.pid)
    killed = time.monotonic()
    os.kill(ps, signal.SIGKILL)
    _, errors = job.communicate(timeout=30)
    assert job.returncode == 1 and time.monotonic() - killed < 15 and "ps" in errors


def test_memory_stays_flat():
    done = run_script("rnn_rpc/bench.py", "--memory", "--vocabularies", 100, "--device", "cuda", timeout=280)
    assert done.returncode == 0, done.stderr
    growth = re.findall(r"^(ps|trainer) .* (-?[\d.]+)$", done.stdout, re.M)
    assert len(growth) == 2 and all(float(value) < 32 for _, value in growth), done.stdout
