"""param_server computes what one process computes: losses and weights of 20 training steps, without dropout.

With one trainer, the additions are those of one process: the tolerance is 1e-6. Several trainers add in another order
than one process: the tolerance is 1e-12 in float64.
"""

import pytest
import torch

from helpers import load_oracle

oracle = load_oracle("param_server")
full_precision, STEPS = oracle.full_precision, oracle.STEPS
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
REMOTE, ASYNC = ("--mode", "remote"), ("--mode", "replica")
SYNC, BOUNDED = (*ASYNC, "--consistency", "sync"), (*ASYNC, "--consistency", "bounded")


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
    losses, weights = oracle.distributed(tmp_path, STEPS, "--world_size", servers + 1, *flags)
    settings = {"momentum": 0.8, "lr": 0.01} if "--momentum" in flags else {}
    expected_losses, expected = oracle.one_process(STEPS, batch_size=8, **settings)
    # With --sync_every the sum of up to three gradients is subtracted at once. One process subtracts them one after the
    # other, which rounds differently. In 20 training steps this changes the result of a ReLU or a maximum that was
    # nearly a tie. A GPU adds in another order.
    tolerance = 1e-4 if {"--sync_every", "cuda"} & set(flags) else 1e-6
    assert losses[servers] == pytest.approx(expected_losses, abs=tolerance)
    assert expected_losses[-1] < expected_losses[0]
    oracle.assert_same_weights(weights, expected, tolerance)


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
    losses, weights = oracle.distributed(tmp_path, STEPS, *flags, run=oracle.run_in_float64)
    expected_losses, expected = oracle.one_process(STEPS, batch_size=8 * trainers, dtype=torch.float64)
    tolerance = 1e-9 if "cuda" in flags else 1e-12
    # The batches are equally large, so the loss of the joined batch is the mean of their losses.
    mean = [sum(step) / trainers for step in zip(*losses.values(), strict=True)]
    assert mean == pytest.approx(expected_losses, rel=0, abs=tolerance)
    oracle.assert_same_weights(weights, expected, tolerance)
