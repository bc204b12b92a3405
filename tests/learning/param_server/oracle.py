"""What the tests of param_server compare with: the same training in one process."""

import re

import pytest
import torch
import torch.nn.functional as F

from helpers import package_on_path
from programs import run_main, run_script

with package_on_path("param_server"):
    from data import Batches, load_digits
    from net import Net

STEPS = 20
COMMON = ("--dataset", "synthetic", "--log_interval", "1", "--batch_size", "8")


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """On a GPU, too."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # cuDNN's convolutions would round to 10 bits


def one_process(steps, batch_size, momentum=0.0, lr=0.03, seed=1, dtype=torch.float32):
    """Train in a plain loop; return (losses, weights by name) after so many training steps."""
    torch.manual_seed(seed)
    net = Net().to(dtype).eval()  # without dropout
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    losses = []
    batches = Batches(*load_digits("synthetic", "", seed, train=True), batch_size, seed)
    for _, data, target in batches.of(0, range(steps)):
        optimizer.zero_grad()
        loss = F.nll_loss(net(data.to(dtype)), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def distributed(tmp_path, steps, *flags, run=run_main):
    """Run main.py; return (losses by trainer, weights by name)."""
    checkpoint = tmp_path / "end.pt"
    flags = (*COMMON, "--no_dropout", "--max_batches", steps, "--checkpoint", checkpoint, *flags)
    done = run("param_server", *flags, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = {}
    for trainer, batch, loss in re.findall(r"^Rank (\d+) training batch (\d+) loss (\S+)$", done.stdout, re.M):
        losses.setdefault(int(trainer), {})[int(batch)] = float(loss)
    state = torch.load(checkpoint, weights_only=True)["state"]
    return {t: [by_batch[k] for k in sorted(by_batch)] for t, by_batch in losses.items()}, state["model"]


def run_in_float64(_, *flags, timeout):
    return run_script("tests/learning/param_server/float64_job.py", *flags, timeout=timeout)


def assert_same_weights(weights, expected, tolerance=1e-6):
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            weights[name], expected[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
