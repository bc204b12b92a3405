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
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine does not have two CUDA GPUs")
TWO_EPOCHS = ("--epochs", 2, "--lr_step", 1)
MOMENTUM = ("--momentum", 0.8, "--lr", 0.01)
BOTH = {"epochs": 2, "momentum": 0.8, "lr": 0.01}


def case(*flags, expect, marks=()):
    return pytest.param(("--mode", *flags), expect, id=flags[0], marks=marks)


def cuda(mode):
    flags = ("--mode", mode, "--device", "cuda")
    return pytest.param(flags, {}, id=f"{mode} on a GPU", marks=[pytest.mark.cuda, NO_GPU])


@pytest.mark.parametrize(
    "flags, settings",
    [
        case("remote", *TWO_EPOCHS, *MOMENTUM, expect=BOTH, marks=pytest.mark.quick),
        case("replica", *TWO_EPOCHS, *MOMENTUM, expect=BOTH),
        case("bounded", expect={}),
        case("overlap", *TWO_EPOCHS, expect={"epochs": 2, "late": 1}),
        case("sharded", "--world_size", 4, "--num_servers", 3, *TWO_EPOCHS, *MOMENTUM, expect=BOTH),
        cuda("remote"),
        cuda("replica"),
        pytest.param(
            ("--mode", "remote", "--device", "cuda", "--num_gpus", 2),
            {},
            id="remote on two GPUs",
            marks=[pytest.mark.cuda, TWO_GPUS],
        ),
    ],
)
def test_one_trainer_equals_one_process(tmp_path, flags, settings):
    steps = STEPS // settings.get("epochs", 1)
    losses, weights = oracle.distributed(tmp_path, steps, "--world_size", 2, *flags)
    (losses,) = losses.values()  # those of the one trainer
    expected_losses, expected = oracle.one_process(steps, batch_size=8, **settings)
    tolerance = 1e-4 if "cuda" in flags else 1e-6  # a GPU adds in another order
    assert losses == pytest.approx(expected_losses, abs=tolerance)
    assert "epochs" in settings or expected_losses[-1] < expected_losses[0]
    oracle.assert_same_weights(weights, expected, tolerance)


@pytest.mark.parametrize(
    "trainers, flags",
    [
        pytest.param(3, (), id="three trainers", marks=pytest.mark.quick),
        pytest.param(2, ("--device", "cuda"), id="on a GPU", marks=[pytest.mark.cuda, NO_GPU]),
    ],
)
def test_sync_equals_one_process_on_the_joined_batch(tmp_path, trainers, flags):
    flags = ("--mode", "sync", *flags, "--world_size", trainers + 1)
    losses, weights = oracle.distributed(tmp_path, STEPS, *flags, run=oracle.run_in_float64)
    expected_losses, expected = oracle.one_process(STEPS, batch_size=8 * trainers, dtype=torch.float64)
    # A GPU divides by a number by multiplying with its inverse, so the last bit of the images, in float32, differs.
    tolerance = 1e-7 if "cuda" in flags else 1e-12
    # The batches are equally large, so the loss of the joined batch is the mean of their losses.
    mean = [sum(step) / trainers for step in zip(*losses.values(), strict=True)]
    assert mean == pytest.approx(expected_losses, rel=0, abs=tolerance)
    oracle.assert_same_weights(weights, expected, tolerance)
