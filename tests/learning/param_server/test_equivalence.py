"""param_server computes what one process computes: losses and weights of 20 training steps, without dropout.

With one trainer, the additions are those of one process: the tolerance is 1e-6. Several trainers add in another order
than one process: the tolerance is 1e-12 in float64.
"""

import re

import pytest
import torch
import torch.nn.functional as F

from helpers import package_on_path, run_main, run_script

with package_on_path("param_server"):
    from data import Batches, load_digits
    from net import Net

STEPS = 20
COMMON = ("--dataset", "synthetic", "--log_interval", "1", "--batch_size", "8")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
REMOTE, ASYNC = ("--mode", "remote"), ("--mode", "replica")
SYNC, BOUNDED = (*ASYNC, "--consistency", "sync"), (*ASYNC, "--consistency", "bounded")


@pytest.fixture(autouse=True)
def one_thread_per_rank(monkeypatch):
    """Several threads per process would make the tests very slow on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # cuDNN's convolutions would round to 10 bits


def one_process(steps, batch_size, momentum=0.0, lr=0.03, seed=1, dtype=torch.float32):
    """Train in a plain loop; return (losses, weights by name) after so many training steps."""
    torch.set_num_threads(1)
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


def run_in_double(_, *flags, timeout):
    return run_script("tests/learning/param_server/double_job.py", *flags, timeout=timeout)


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


def assert_same_weights(weights, expected, tolerance=1e-6):
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            weights[name], expected[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def slow(*flags, id):
    return pytest.param(flags, id=id, marks=pytest.mark.slow)


def cuda(*flags, id):
    return pytest.param((*flags, "--device", "cuda"), id=f"{id} on a GPU", marks=[pytest.mark.cuda, NO_GPU])


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(REMOTE, id="remote"),
        pytest.param((*ASYNC, "--num_servers", 2), id="async, two servers"),
        slow(*REMOTE, "--momentum", "0.8", "--lr", "0.01", id="remote, momentum"),
        slow(*ASYNC, "--momentum", "0.8", "--lr", "0.01", id="async, momentum"),
        slow(*BOUNDED, id="bounded"),
        slow(*ASYNC, "--sync_every", "3", id="local steps"),
        cuda(*REMOTE, id="remote"),
        cuda(*ASYNC, id="async"),
    ],
)
def test_one_trainer_equals_one_process(tmp_path, flags):
    servers = 2 if "--num_servers" in flags else 1
    losses, weights = distributed(tmp_path, STEPS, "--world_size", servers + 1, *flags)
    settings = {"momentum": 0.8, "lr": 0.01} if "--momentum" in flags else {}
    expected_losses, expected = one_process(STEPS, batch_size=8, **settings)
    # With --sync_every the sum of up to three gradients is subtracted at once. One process subtracts them one after the
    # other, which rounds differently. In 20 training steps this changes the result of a ReLU or a maximum that was
    # nearly a tie. A GPU adds in another order.
    tolerance = 1e-4 if {"--sync_every", "cuda"} & set(flags) else 1e-6
    assert losses[servers] == pytest.approx(expected_losses, abs=tolerance)
    assert expected_losses[-1] < expected_losses[0]
    assert_same_weights(weights, expected, tolerance)


@pytest.mark.parametrize(
    "trainers, servers, flags",
    [
        pytest.param(2, 2, SYNC, id="two servers"),
        pytest.param(4, 1, SYNC, id="four trainers", marks=pytest.mark.slow),
        pytest.param(2, 3, SYNC, id="three servers", marks=pytest.mark.slow),
        pytest.param(2, 1, (*SYNC, "--device", "cuda"), id="on a GPU", marks=[pytest.mark.cuda, NO_GPU]),
    ],
)
def test_sync_equals_one_process_on_the_joined_batch(tmp_path, trainers, servers, flags):
    flags = (*flags, "--num_servers", servers, "--world_size", trainers + servers)
    losses, weights = distributed(tmp_path, STEPS, *flags, run=run_in_double)
    expected_losses, expected = one_process(STEPS, batch_size=8 * trainers, dtype=torch.float64)
    tolerance = 1e-9 if "cuda" in flags else 1e-12
    # The batches are equally large, so the loss of the joined batch is the mean of their losses.
    mean = [sum(step) / trainers for step in zip(*losses.values(), strict=True)]
    assert mean == pytest.approx(expected_losses, rel=0, abs=tolerance)
    assert_same_weights(weights, expected, tolerance)
