"""param_server computes what one process computes: losses and weights of 20 steps, dropout off, to 1e-6."""

import re
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F

from helpers import package_on_path, run_main

with package_on_path("param_server"):
    from digits_net import Net
    from mnist_data import Shard, load_digits

STEPS = 20
COMMON = ("--dataset", "synthetic", "--no_dropout", "--log_interval", "1", "--batch_size", "8")


@pytest.fixture(autouse=True)
def one_thread_per_rank(monkeypatch):
    """Threads that wait for each other crawl when a machine is busy with other things."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def one_process(steps, batch_size, momentum=0.0, lr=0.03, seed=1):
    """The plain loop: (losses, weights by name) after so many steps."""
    args = Namespace(dataset="synthetic", seed=seed, batch_size=batch_size, max_batches=steps)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    net = Net(dropout=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    losses = []
    for data, target in Shard(*load_digits(args, train=True), args, 0, 1).batches(epoch=0):
        optimizer.zero_grad()
        loss = F.nll_loss(net(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def distributed(tmp_path, steps, *flags):
    """Run main.py: (losses by trainer, weights by name)."""
    checkpoint = tmp_path / "end.pt"
    done = run_main("param_server", *COMMON, "--max_batches", steps, "--checkpoint", checkpoint, *flags, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = {}
    for trainer, batch, loss in re.findall(r"^Rank (\d+) training batch (\d+) loss (\S+)$", done.stdout, re.M):
        losses.setdefault(int(trainer), {})[int(batch)] = float(loss)
    state = torch.load(checkpoint, weights_only=True)["state"]
    return {t: [by_batch[k] for k in sorted(by_batch)] for t, by_batch in losses.items()}, state["model"]


def assert_same_weights(weights, expected, tolerance=1e-6):
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            weights[name], expected[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--mode", "remote"], id="remote"),
        pytest.param(["--mode", "replica"], id="async"),
        pytest.param(["--mode", "replica", "--consistency", "sync"], id="sync", marks=pytest.mark.slow),
        pytest.param(["--mode", "replica", "--consistency", "bounded"], id="bounded", marks=pytest.mark.slow),
        pytest.param(["--mode", "replica", "--sync_every", "3"], id="local steps", marks=pytest.mark.slow),
    ],
)
def test_one_trainer_equals_one_process(tmp_path, flags):
    losses, weights = distributed(tmp_path, STEPS, "--world_size", 2, *flags)
    expected_losses, expected = one_process(STEPS, batch_size=8)
    # Local steps subtract the sum of up to three gradients where one process subtracts one after the other. That rounds
    # differently, and in 20 steps a ReLU or a maximum that was a tie falls the other way.
    tolerance = 1e-4 if "--sync_every" in flags else 1e-6
    assert losses[1] == pytest.approx(expected_losses, abs=tolerance)
    assert expected_losses[-1] < expected_losses[0]
    assert_same_weights(weights, expected, tolerance)


@pytest.mark.parametrize("mode", ["remote", "replica"])
@pytest.mark.slow
def test_momentum_equals_one_process(tmp_path, mode):
    flags = ("--world_size", 2, "--mode", mode, "--momentum", "0.8", "--lr", "0.01")
    losses, weights = distributed(tmp_path, STEPS, *flags)
    expected_losses, expected = one_process(STEPS, batch_size=8, momentum=0.8, lr=0.01)
    assert losses[1] == pytest.approx(expected_losses, abs=1e-6)
    assert_same_weights(weights, expected)


@pytest.mark.parametrize(
    "trainers, servers",
    [
        pytest.param(2, 1),
        pytest.param(2, 3, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
    ],
)
def test_sync_equals_one_process_on_the_joined_batch(tmp_path, trainers, servers):
    flags = ("--mode", "replica", "--consistency", "sync", "--num_servers", servers, "--world_size", trainers + servers)
    losses, weights = distributed(tmp_path, STEPS, *flags)
    expected_losses, expected = one_process(STEPS, batch_size=8 * trainers)
    # Batches of equal size: the joined batch's loss is the mean.
    mean = [sum(step) / trainers for step in zip(*losses.values(), strict=True)]
    assert mean == pytest.approx(expected_losses, abs=1e-6)
    assert_same_weights(weights, expected)


def test_several_servers_hold_together_what_one_would(tmp_path):
    losses, weights = distributed(tmp_path, STEPS, "--mode", "replica", "--num_servers", 2, "--world_size", 3)
    expected_losses, expected = one_process(STEPS, batch_size=8)
    assert losses[2] == pytest.approx(expected_losses, abs=1e-6)
    assert_same_weights(weights, expected)
