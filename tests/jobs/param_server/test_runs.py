"""param_server as a user runs it: every mode learns, bad input is refused, nothing is lost after kill -9."""

import contextlib
import json
import os
import re
import shutil
import signal
import time

import pytest
import torch

from helpers import assert_one_line_error, assert_refused, load_bench
from jobs import free_port
from processes import ranks_of
from programs import run_main, run_script, start_main

BYTES = load_bench("bytes_per_step")
DRAWN = ("--dataset", "synthetic")
MODES = ("remote", "replica", "bounded", "sync", "overlap", "sharded")


def from_files(folder):
    return "--dataset", "mnist", "--data_dir", folder


def run(*flags, timeout=150):
    done = run_main("param_server", *DRAWN, *flags, timeout=timeout)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr
    return done


# ------------------------------------------------------------------------------------------------- learning


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replica", "remote"])
@pytest.mark.draw(2, "learns")
def test_a_run_learns_and_reports_its_figures(tmp_path, mode):
    summary_file, curve = tmp_path / "summary.json", tmp_path / "curve.png"
    flags = ("--world_size", 3, "--max_batches", 200, "--lr", 0.05, "--log_interval", 50)
    done = run("--mode", mode, *flags, "--summary_json", summary_file, "--plot", curve)
    summary = json.loads(summary_file.read_text())
    assert re.search(r"^Epoch 1: Accuracy 0\.\d{4}, ", done.stdout, re.M)
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("Rank")} == {"1", "2"}
    assert summary["test_accuracy"] > 0.8
    assert summary["dataset"] == "synthetic" and summary["restarts"] == 0 and summary["images_per_second"] > 0
    assert summary["updates"] == 400 and summary["staleness_max"] > 0
    assert curve.stat().st_size > 5_000


def test_the_accuracy_is_that_of_the_test_images(few_digits, tmp_path):
    """Here all training images are called threes, and all test images sevens."""
    folder = shutil.copytree(few_digits, tmp_path / "digits")
    for part, digit in (("train", 3), ("t10k", 7)):
        labels = folder / f"{part}-labels-idx1-ubyte"
        content = labels.read_bytes()
        labels.write_bytes(content[:8] + bytes([digit]) * (len(content) - 8))
    done = run_main("param_server", "--data_dir", folder, "--world_size", 2, "--max_batches", 30)
    assert "Accuracy 0.0000" in done.stdout, (done.stdout, done.stderr)


@pytest.mark.slow
def test_what_crosses_the_wire(few_digits):
    """Difference 4: in `remote` images and predictions are sent, not 9.6 MB of gradients and weights for an assert."""
    figures = {}
    for mode in ("remote", "replica"):
        flags = ("--mode", mode, *from_files(few_digits), "--world_size", 2, "--max_batches", 20)
        done = run_script("bench/bytes_per_step.py", "param_server", *flags)
        assert done.returncode == 0, done.stderr
        figures[mode] = BYTES.per_step(done.stdout)
    tensors = 32 * (28 * 28 + 2 * 10) * 4  # images; log-probabilities and their gradients
    assert tensors < figures["remote"] < tensors + 30_000
    tensors = 2 * 1_199_882 * 4  # gradients to the server, weights back
    assert tensors < figures["replica"] < tensors + 30_000


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.draw(2)
def test_four_trainers_in_every_mode(mode, digits, tmp_path):
    ranks = 4 + (2 if mode == "sharded" else 1)
    flags = ("--mode", mode, "--world_size", ranks, "--max_batches", 8, "--summary_json", tmp_path / "s.json")
    done = run_main("param_server", *flags, *from_files(digits), timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["updates"] == (8 if mode == "sync" else 4 * 8)
    assert (summary["staleness_max"] > 0) == (mode != "sync")


@pytest.mark.slow
def test_each_rank_obeys_its_own_command_line(tmp_path, digits):
    """In terminals: a flag that only rank 0 has is obeyed, whichever trainer calls first. Two epochs."""
    job = ("--mode", "replica", "--world_size", 3, "--epochs", 2, "--lr_step", 1, "--max_batches", 10)
    job = (*job, "--master_port", free_port(), "--rank")
    checkpoint, summary = tmp_path / "c.pt", tmp_path / "s.json"
    zero = ("--data_dir", digits, "--checkpoint", checkpoint, "--summary_json", summary)
    others = [start_main("param_server", *job, rank, "--data_dir", digits) for rank in (2, 1)]
    rank0 = start_main("param_server", *job, 0, *zero)
    for process in (rank0, *others):
        done = process.result()
        assert (done.returncode, done.stderr) == (0, ""), done
    assert json.loads(summary.read_text())["updates"] == 40 == updates_in(checkpoint)


@pytest.mark.slow
def test_a_trainers_num_gpus_is_not_ignored(tmp_path, digits):
    """In the text a trainer's --num_gpus decides where the network is. Here all ranks must say the same."""
    job = ("--world_size", 2, "--data_dir", digits, "--max_batches", 1, "--master_port", free_port(), "--rank")
    with start_main("param_server", *job, 0):
        refused = run_main("param_server", *job, 1, "--num_gpus", 0)
    assert_one_line_error(refused, 2, "it was started with num_gpus 0, and this job with None")


@pytest.mark.slow
def test_measuring_and_saving_change_neither_updates_nor_weights(tmp_path, digits):
    """A measurement falls between two updates, after as many batches of each trainer, so not after 8 of 30."""
    flags = (*from_files(digits), "--mode", "sync", "--world_size", 4, "--batch_size", 16, "--max_batches", 10)
    plain, measured = tmp_path / "plain.pt", tmp_path / "measured.pt"
    done = run_main("param_server", *flags, "--checkpoint", plain)
    assert done.returncode == 0, done.stderr
    more = ("--evaluations", 4, "--summary_json", tmp_path / "s.json")
    done = run_main("param_server", *flags, "--checkpoint", measured, *more)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^Epoch 1, update (\d+): Accuracy", done.stdout, re.M) == ["3", "6", "9"]
    assert json.loads((tmp_path / "s.json").read_text())["curves"]["test accuracy"][0] == [3, 6, 9, 10]
    assert updates_in(plain) == updates_in(measured) == 10
    assert_same_weights(measured, plain, tolerance=0)


@pytest.mark.slow
@pytest.mark.crowd
@pytest.mark.parametrize("mode", ["bounded", "sync"])
@pytest.mark.draw(1)
def test_more_callers_than_rpc_threads_and_checkpoints_end_without_a_hang(tmp_path, mode):
    """If trainers that wait blocked the server's RPC threads, none would be left for those that they wait for."""
    flags = ("--mode", mode, "--world_size", 9, "--batch_size", 8, "--max_batches", 20)
    flags = (*flags, "--lr", 0.003, "--checkpoint", tmp_path / "c.pt", "--evaluations", 4)
    done = run_script("tests/jobs/param_server/more_trainers_than_threads_job.py", *DRAWN, *flags, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert updates_in(tmp_path / "c.pt") == (20 if mode == "sync" else 160)


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--num_gpus", "5"], ["--num_gpus", "0, 1, 2"]),
        (["--num_gpus", "3"], ["--num_gpus"]),  # difference 7: the tutorial's check lets 3 through
        (["--world_size", "1"], ["--world_size 1", "trainer"]),
        (["--mode", "sharded", "--num_servers", "3", "--world_size", "3"], ["--world_size 3", "at least 4", "trainer"]),
        (["--mode", "replica", "--max_staleness", "2"], ["--max_staleness", "bounded"]),
        (["--mode", "replica", "--num_gpus", "1"], ["--num_gpus", "remote"]),
        (["--device", "cuda", "--num_gpus", "0"], ["--num_gpus 0 and --device cuda"]),
        (["--lr", "-1"], ["--lr"]),
        (["--batch_size", "0"], ["--batch_size"]),
        (["0", "0"], ["unrecognized arguments: 0 0"]),  # difference 6: --rank and --num_gpus are flags
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(flags, words, capsys):
    assert_refused("param_server", flags, capsys, *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    assert_refused("param_server", ["--num_gpus", 1], capsys, "--device cuda", "torch sees no CUDA GPU")


def test_unusable_data_ends_the_whole_job_with_status_1(tmp_path):
    """Difference 11: in the tutorial the child's failure is ignored, and the exit status is 0."""
    for part in ("train", "t10k"):
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte"):
            (tmp_path / f"{part}-{name}").write_bytes(b"\0\0\x08\x03")
    done = run_main("param_server", "--data_dir", tmp_path, "--world_size", 3, timeout=100)
    assert_one_line_error(done, 1, "is not a file of MNIST")


@pytest.mark.parametrize(
    "mode", ["sync", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("remote", "overlap"))]
)
@pytest.mark.draw(1)
def test_too_high_a_learning_rate_ends_the_run_in_one_line(tmp_path, mode):
    summary = tmp_path / "s.json"
    flags = ("--mode", mode, "--lr", "1e30", "--max_batches", 20, "--summary_json", summary)
    done = run_main("param_server", *DRAWN, *flags, timeout=100)
    assert_one_line_error(done, 1, "step ", " is ", "training has diverged, try a lower --lr")
    assert not summary.exists()


# ------------------------------------------------------------------------------------------------- checkpoints


def wait_for(condition, process):
    """Alone, five ranks need 10 s until their first training steps; with other tests it may take minutes."""
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        assert process.poll() is None, process.text()
        time.sleep(0.02)


def updates_in(checkpoint):
    return torch.load(checkpoint, weights_only=True)["state"]["progress"]["updates"]


def optimizers(state):
    """Return the states of all servers' optimizers."""
    return [state["optimizer"], *state.get("shards", [])]


def assert_same_weights(checkpoint, expected_checkpoint, tolerance):
    weights, expected = (torch.load(f, weights_only=True)["state"] for f in (checkpoint, expected_checkpoint))
    for name in expected["model"]:
        torch.testing.assert_close(weights["model"][name], expected["model"][name], rtol=0, atol=tolerance)
    for found, optimizer in zip(optimizers(weights), optimizers(expected), strict=True):
        for place, state in optimizer["state"].items():
            if state.get("momentum_buffer") is not None:
                momentum = found["state"][place]["momentum_buffer"]
                torch.testing.assert_close(momentum, state["momentum_buffer"], rtol=0, atol=tolerance)


RESUMED = {  # mode: (flags, tolerance of the weights)
    "remote": (("--world_size", 2, "--no_dropout"), 1e-6),
    "sync": (("--mode", "sync", "--world_size", 4, "--momentum", 0.5), 0),
    "sharded": (("--mode", "sharded", "--num_servers", 3, "--world_size", 4, "--momentum", 0.5), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", RESUMED)
@pytest.mark.draw(1)
def test_killed_and_resumed_ends_where_an_unbroken_run_ends(tmp_path, digits, mode):
    """With `sync` equal to the bit, with dropout: the order of pushes and the moment of the kill make no difference."""
    flags, tolerance = RESUMED[mode]
    flags = (*from_files(digits), *flags, "--batch_size", 8, "--max_batches", 60)
    unbroken, broken = tmp_path / "unbroken.pt", tmp_path / "broken.pt"
    assert run_main("param_server", *flags, "--checkpoint", unbroken).returncode == 0
    flags = (*flags, "--checkpoint", broken, "--evaluations", 8)
    process = start_main("param_server", *flags)
    wait_for(broken.exists, process)
    process.kill()
    at = updates_in(broken)
    assert at % 8 == 0 and at < 60
    resumed = run_main("param_server", *flags, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"Going on after update {at}, with 0 of 1 epochs done." in resumed.stdout
    assert updates_in(broken) == 60
    assert_same_weights(broken, unbroken, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.draw(1)
def test_an_epoch_goes_on_with_fewer_or_more_trainers(tmp_path, few_digits, world_size):
    """Two trainers are killed in the middle of an epoch; one or four continue it. Each image is applied once."""
    checkpoint, summary = tmp_path / "c.pt", tmp_path / "s.json"
    flags = (*from_files(few_digits), "--mode", "replica", "--checkpoint", checkpoint)
    process = start_main("param_server", *flags, "--world_size", 3, "--evaluations", 10)
    wait_for(checkpoint.exists, process)
    process.kill()
    assert 0 < torch.load(checkpoint, weights_only=True)["state"]["progress"]["batch"] < 3_200 // 32
    resumed = run_main(
        "param_server", *flags, "--resume", "--world_size", world_size, "--summary_json", summary, timeout=200
    )
    assert resumed.returncode == 0, resumed.stderr
    figures = json.loads(summary.read_text())
    assert figures["images_applied"] == [3_200] and figures["updates"] == 3_200 // 32


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_epochs_and_trainers_and_refuses_other_settings(tmp_path, digits):
    checkpoint = tmp_path / "end.pt"
    flags = (*from_files(digits), "--mode", "replica", "--momentum", "0.5", "--max_batches", 5)
    flags = (*flags, "--checkpoint", checkpoint)
    run(*flags)
    more = run(*flags, "--resume", "--epochs", 2)
    assert "Epoch 2: Accuracy" in more.stdout and "Epoch 1:" not in more.stdout
    more = run(*flags, "--resume", "--epochs", 3, "--world_size", 4)
    assert "Epoch 3: Accuracy" in more.stdout and "25 updates" not in more.stdout and "35 updates" in more.stdout
    finished = checkpoint.read_bytes()
    again = run(*flags, "--resume", "--epochs", 3)
    assert "Going on after update 35, with 3 of 3 epochs done." in again.stdout and "Nothing is left" in again.stdout
    assert checkpoint.read_bytes() == finished
    other = run_main("param_server", *flags, "--resume", "--batch_size", 16)
    assert_one_line_error(other, 1, "made with --batch_size 32, and this run has 16")
    content = torch.load(checkpoint, weights_only=True)
    content["state"]["model"]["fc2.bias"] = torch.zeros(11)
    torch.save(content, checkpoint)
    assert_one_line_error(
        run_main("param_server", *flags, "--resume"), 1, f"cannot go on from {checkpoint}", "fc2.bias"
    )


# ------------------------------------------------------------------------------------------------- lost ranks


def kill_a_trainer_when_training(process, trainer, checkpoint):
    wait_for(checkpoint.exists, process)  # written after the first updates, when all trainers are training
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(ranks_of(process.pid)[trainer], signal.SIGKILL)


@pytest.mark.slow
def test_a_lost_trainer_ends_the_job_with_status_1(tmp_path, digits):
    checkpoint = tmp_path / "c.pt"
    flags = (*from_files(digits), "--mode", "sync", "--world_size", 3)
    flags = (*flags, "--checkpoint", checkpoint, "--evaluations", 30)
    process = start_main("param_server", *flags)
    kill_a_trainer_when_training(process, 1, checkpoint)
    done = process.result(40)
    assert done.returncode == 1, done
    assert "trainer1" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_killed_trainer_comes_back_with_max_restarts(tmp_path, digits):
    checkpoint, summary = tmp_path / "c.pt", tmp_path / "s.json"
    flags = (*from_files(digits), "--mode", "sync", "--world_size", 5, "--lr", 0.1, "--seed", 3)
    flags = (*flags, "--max_batches", 75, "--max_restarts", 1, "--checkpoint", checkpoint, "--evaluations", 15)
    process = start_main("param_server", *flags, "--summary_json", summary)
    kill_a_trainer_when_training(process, 3, checkpoint)
    done = process.result(200)
    assert done.returncode == 0 and "Going on after update" in done.stdout, done
    figures = json.loads(summary.read_text())
    assert figures["restarts"] == 1 and figures["updates"] == 75
    assert figures["test_accuracy"] > 0.6
