"""Tests that each mode of ddp_rpc computes the same as one process: the table and fc after two epochs, to 1e-5."""

import json

import pytest
import torch

from helpers import load_oracle

oracle = load_oracle("ddp_rpc")
distributed, largest_difference, one_process = oracle.distributed, oracle.largest_difference, oracle.one_process


@pytest.mark.quick
def test_sync_trainers_equal_one_process_on_the_joined_batch(tmp_path):
    """This also shows that each trainer draws its own batches, and that the seed determines all random numbers.

    Each trainer evaluates a part of the held-out bags. What is reported is of all of them.
    """
    trainers, servers, seed = 3, 2, 2
    file = tmp_path / "summary.json"
    sizes = ("--world_size", trainers + 1 + servers, "--num_servers", servers, "--seed", seed)
    found = distributed(tmp_path, "--mode", "sync", "--sparse", *sizes, "--summary_json", file)
    figures, summary = oracle.heldout_figures(*found, seed), json.loads(file.read_text())
    assert {name: summary[name] for name in figures} == pytest.approx(figures, abs=5e-4)  # four bags of 8,192
    assert largest_difference(found, one_process(trainers, seed=seed)) < 1e-5
    # The batches of trainer 0 alone give another result.
    assert largest_difference(found, one_process(1, seed=seed)) > 1e-3


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["hogwild", "pipelined"])
def test_a_single_trainer_equals_one_process(tmp_path, mode):
    """In `pipelined` its lookups are one step old. Without --sparse, test_every_flag_has_its_effect sees `hogwild`."""
    found = distributed(tmp_path, "--mode", mode, "--world_size", 4, "--num_servers", 2, "--sparse")
    fresh, one_step_old = one_process(), one_process(stale_lookups=True)
    expected, other = (fresh, one_step_old) if mode == "hogwild" else (one_step_old, fresh)
    assert largest_difference(found, expected) < 1e-5
    assert largest_difference(found, other) > 1e-4


def test_a_run_that_goes_on_with_other_servers_equals_one_that_was_not_interrupted(tmp_path):
    """The plain loop writes the checkpoint of epoch 1, and a run with three servers resumes from it."""
    table, fc = one_process(2, epochs=1)
    oracle.save_checkpoint(tmp_path / "end.pt", table, fc)
    flags = ("--mode", "sync", "--world_size", 6, "--num_servers", 3, "--resume")
    curves = ("--log_interval", 5, "--summary_json", tmp_path / "summary.json")
    found = distributed(tmp_path, *flags, *curves, says="Going on after epoch 1.")
    assert largest_difference(found, one_process(2)) < 1e-5
    assert largest_difference(found, (table, fc)) > 1e-3
    steps, _ = json.loads((tmp_path / "summary.json").read_text())["curves"]["loss/train"]
    assert steps == [20, 25, 30]  # the first epoch had 15


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize(
    ("mode", "trainers", "table_device"),
    [("hogwild", 1, "same"), ("sync", 2, "same"), ("pipelined", 1, "same"), ("pipelined", 1, "cpu")],
)
def test_on_gpus_it_equals_one_process_on_the_cpu(tmp_path, mode, trainers, table_device):
    """Equal to 1e-4, because a GPU adds in another order."""
    place = ("--device", "cuda", "--table_device", table_device, "--world_size", trainers + 3, "--num_servers", 2)
    found = distributed(tmp_path, "--mode", mode, "--sparse", *place)
    assert largest_difference(found, one_process(trainers, stale_lookups=mode == "pipelined")) < 1e-4
