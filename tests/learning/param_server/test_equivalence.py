"""param_server computes what one process computes: losses and weights of 20 training steps, without dropout.

With one trainer, the additions are those of one process: the tolerance is 1e-6. Several trainers add in another order
than one process: the tolerance is 1e-12 in float64.
"""

import pytest
import torch

from helpers import load_oracle
from patches import main_with

oracle = load_oracle("param_server")
full_precision, STEPS = oracle.full_precision, oracle.STEPS
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine does not have two CUDA GPUs")
MOMENTUM = ("--momentum", 0.8, "--lr", 0.01)
BOTH = {"epochs": 2, "momentum": 0.8, "lr": 0.01}


def case(*flags, expect, marks=()):
    return pytest.param(("--mode", *flags), expect, id=flags[0], marks=marks)


def cuda(*flags, name, expect=None, need=NO_GPU):
    return pytest.param(("--device", "cuda", *flags), expect or {}, id=name, marks=[pytest.mark.cuda, need])


@pytest.mark.parametrize(
    "flags, settings",
    [
        case("remote", *MOMENTUM, expect=BOTH, marks=pytest.mark.quick),
        case("replica", *MOMENTUM, expect=BOTH),
        case("overlap", expect={"epochs": 2, "late": 1}),
        case("sharded", "--world_size", 4, "--num_servers", 3, *MOMENTUM, expect=BOTH),
        cuda("--mode", "remote", name="remote on a GPU"),
        cuda("--mode", "replica", name="replica on a GPU"),
        cuda("--mode", "sharded", "--world_size", 3, *MOMENTUM, name="sharded on a GPU", expect=BOTH),
        cuda("--mode", "remote", "--num_gpus", 2, name="remote on two GPUs", need=TWO_GPUS),
    ],
)
def test_one_trainer_equals_one_process(tmp_path, few_digits, flags, settings):
    """In `remote` and `sharded` the second epoch is of a second run, which goes on from the checkpoint of the first."""
    settings = {"epochs": 1, "late": 0, **settings}
    epochs, late = settings.pop("epochs"), settings.pop("late")
    flags = ("--world_size", 2, "--batch_size", 8, "--lr_step", 1, "--max_batches", STEPS // epochs, *flags)
    losses = []
    for until in range(1, epochs + 1) if {"remote", "sharded"} & {*flags} else [epochs]:
        more = ("--epochs", until, "--resume") if losses else ("--epochs", until)
        summary, printed, weights = oracle.distributed(tmp_path, few_digits, *flags, *more)
        losses += printed.popitem()[1]
        assert not printed and summary["updates"] == until * STEPS // epochs
    updates = oracle.updates_of_one_process(STEPS // epochs, epochs, late)
    expected_losses, expected = oracle.train(updates, few_digits, batch_size=8, **settings)
    tolerance = 1e-4 if "cuda" in flags else 1e-6  # a GPU adds in another order
    assert losses == pytest.approx(expected_losses, abs=tolerance)
    oracle.assert_same_weights(weights, expected, tolerance)


def computes_in_float64(net):
    make, forward = net.Net.__init__, net.Net.forward

    def make_double(self, *arguments, **how):
        make(self, *arguments, **how)
        self.double()

    net.Net.__init__ = make_double
    net.Net.forward = lambda self, x: forward(self, x.double())


@pytest.mark.parametrize(
    "trainers, flags",
    [
        pytest.param(3, (), id="three trainers", marks=pytest.mark.quick),
        pytest.param(2, ("--device", "cuda"), id="on a GPU", marks=[pytest.mark.cuda, NO_GPU]),
    ],
)
def test_sync_equals_one_process_on_the_joined_batch(tmp_path, few_digits, trainers, flags):
    """In float64, where another order of additions changes only the 15th digit. In float32 it can change the 6th."""
    main = main_with("param_server", tmp_path, computes_in_float64)
    flags = ("--mode", "sync", "--world_size", trainers + 1, "--batch_size", 8, "--max_batches", STEPS, *flags)
    _, losses, weights = oracle.distributed(tmp_path, few_digits, *flags, main=main)
    updates = oracle.updates_of_one_process(STEPS)
    expected_losses, expected = oracle.train(updates, few_digits, 8 * trainers, dtype=torch.float64)
    # A GPU divides by a number by multiplying with its inverse, so the last bit of the images, in float32, differs.
    tolerance = 1e-7 if "cuda" in flags else 1e-12
    # The batches are equally large, so the loss of the joined batch is the mean of their losses.
    mean = [sum(step) / trainers for step in zip(*losses.values(), strict=True)]
    assert mean == pytest.approx(expected_losses, rel=0, abs=tolerance)
    oracle.assert_same_weights(weights, expected, tolerance)
