"""ddp_rpc from outside: what its runs print and write."""

import json
import re

import pytest
import torch

from helpers import assert_one_line_error, run_main, start_main

SMALL = ("--batches", 20, "--epochs", 2)


def run(tmp_path, *flags, timeout=120):
    """Run main.py to its good end; return (stdout, summary)."""
    file = tmp_path / "summary.json"
    done = run_main("ddp_rpc", *flags, "--summary_json", file, timeout=timeout)
    assert done.returncode == 0 and done.stderr == "", (done.stdout, done.stderr)
    return done.stdout, json.loads(file.read_text())


def test_pipelined_learns_and_every_epoch_says_so(tmp_path):
    """Difference 7: the tutorial prints only epoch numbers, and its targets cannot be learned."""
    out, summary = run(tmp_path, "--mode", "pipelined", "--num_servers", 2, "--epochs", 4, "--lr", 0.2)
    losses = [float(loss) for loss in re.findall(r"held-out loss (\S+)", out)]
    assert len(losses) == 5 and losses[-1] < 0.7 * losses[0]
    assert summary["heldout_accuracy"] > 0.5 > 0.2 > float(re.search(r"accuracy (\S+)", out)[1])
    assert summary["replicas_max_difference"] == 0
    wanted = ("ceiling_accuracy", "batches_per_second", "samples_per_second", "wire_bytes_per_step")
    assert all(summary[name] > 0 for name in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "averaged", "pipelined"])
def test_the_default_run_comes_within_two_points_of_the_teacher(tmp_path, mode):
    more = ("--lr", 0.1) if mode == "averaged" else ()  # its table learns at half the rate with two trainers
    _, summary = run(tmp_path, "--mode", mode, *more, timeout=200)
    assert summary["heldout_accuracy"] > summary["ceiling_accuracy"] - 0.02


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "averaged", "pipelined"])
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (1, 2), (2, 2), (3, 1), (3, 2)])  # (2, 1): all other tests
def test_any_number_of_trainers_and_servers(tmp_path, mode, trainers, servers):
    _, summary = run(
        tmp_path, *SMALL, "--mode", mode, "--num_trainers", trainers, "--num_servers", servers, "--embedding_dim", 24
    )  # difference 5: a dimension other than the literal 16
    assert summary["world_size"] == trainers + 1 + servers
    assert summary["replicas_max_difference"] == 0 and summary["heldout_accuracy"] > 0.15


def test_training_may_last_longer_than_the_rpc_timeout(tmp_path):
    """Difference 3: the training function is one RPC, and the tutorial's would be cut off after 60 seconds."""
    _, summary = run(
        tmp_path, "--mode", "pipelined", "--rpc_timeout", 2, "--epochs", 8, "--batches", 300, "--num_trainers", 1
    )
    trained = 8 * 300 / summary["batches_per_second"]
    assert trained > 2 and summary["heldout_accuracy"] > 0.3


def test_a_checkpoint_of_one_server_goes_on_with_three(tmp_path):
    file = tmp_path / "clicks.pt"
    sizes = ("--num_embeddings", 10_000, "--batches", 10, "--mode", "averaged", "--checkpoint", file)
    first, _ = run(tmp_path, *sizes, "--epochs", 1, "--num_trainers", 1)
    saved = torch.load(file, weights_only=True)["state"]["table"]
    # No epoch left: three servers hold the rows now, give the same figures, and nothing is trained.
    again, _ = run(tmp_path, *sizes, "--epochs", 1, "--num_trainers", 1, "--num_servers", 3, "--resume")
    assert saved.shape == (10_000, 16)
    last_line = re.findall(r"^epoch   1/1  (held-out loss \S+  accuracy \S+)", first, re.M)[-1]
    assert last_line in again and "Going on after epoch 1" in again


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path):
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    flags = ("--num_embeddings", 500, "--batches", 10, "--mode", "averaged")
    run(tmp_path, *flags, "--epochs", 4, "--checkpoint", whole)
    # Stopped in epoch 3 or later, by Ctrl-C; then on to the end, on three servers.
    process = start_main("ddp_rpc", *flags, "--epochs", 4, "--batches", 10, "--checkpoint", parts)
    for line in process.stdout:
        if line.startswith("epoch   2/"):
            process.send_signal(2)
            break
    process.communicate(timeout=30)
    run(tmp_path, *flags, "--epochs", 4, "--checkpoint", parts, "--resume", "--num_servers", 3)
    one, other = (torch.load(file, weights_only=True)["state"] for file in (whole, parts))
    assert one["epoch"] == other["epoch"] == 4
    torch.testing.assert_close(one["table"], other["table"], rtol=0, atol=1e-5)


def test_a_checkpoint_of_other_sizes_is_refused_in_one_line(tmp_path):
    file = tmp_path / "small.pt"
    torch.save({"scenario": "ddp_rpc", "state": {"epoch": 1, "table": torch.zeros(10, 16), "fc": {}}}, file)
    done = run_main("ddp_rpc", *SMALL, "--checkpoint", file, "--resume")
    assert_one_line_error(done, 1, "10 x 16", "100 x 16")


@pytest.mark.slow
def test_random_targets_cannot_be_learned(tmp_path):
    """Difference 7: with the tutorial's targets a model stays where it started, whatever is right or wrong in it."""
    _, summary = run(tmp_path, "--targets", "random", "--mode", "pipelined", "--epochs", 5)
    assert summary["heldout_accuracy"] < 0.16 and summary["heldout_loss"] > 2.0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    """Difference 10: with averaged gradients even two trainers repeat themselves."""
    losses = [run(tmp_path, *SMALL, "--mode", "averaged", "--seed", seed)[1]["heldout_loss"] for seed in (5, 5, 6)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert abs(losses[0] - losses[2]) > 1e-3


@pytest.mark.slow
def test_two_jobs_side_by_side(tmp_path):
    """Difference 6: the tutorial's two fixed ports allow one job on a machine."""
    jobs = [start_main("ddp_rpc", *SMALL, "--mode", "pipelined") for _ in range(2)]
    for job in jobs:
        out, err = job.communicate(timeout=120)
        assert job.returncode == 0 and err == "" and "replicas of fc identical" in out


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["averaged", "pipelined"])
def test_a_large_table_costs_no_more_bytes_on_the_wire(tmp_path, mode):
    flags = (*SMALL, "--mode", mode, "--transport", "tcp")
    per_step = {
        rows: run(tmp_path, *flags, "--num_embeddings", rows)[1]["wire_bytes_per_step"] for rows in (1_000, 1_000_000)
    }
    assert 1_000 < per_step[1_000_000] < 1.1 * per_step[1_000]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("wire", ["direct", "cpu"])
@pytest.mark.parametrize("table", ["same", "cpu"])
@pytest.mark.parametrize("mode", ["sync", "averaged", "pipelined"])
def test_one_shared_gpu(tmp_path, mode, table, wire):
    _, summary = run(
        tmp_path, *SMALL, "--device", "cuda", "--mode", mode, "--table_device", table, "--wire", wire, timeout=200
    )
    assert summary["device"] == "cuda" and summary["replicas_max_difference"] == 0
