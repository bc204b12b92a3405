"""param_server as a user runs it: it learns, bad input is refused, nothing is lost after kill -9."""

import json
import re
import shutil
import time

import pytest
import torch

from faults import changed_package
from helpers import assert_one_line_error, assert_refused, load_bench, package_on_path
from programs import Program, run_main, run_script

BYTES = load_bench("bytes_per_step")


def test_a_run_learns_and_reports_its_figures(tmp_path, digits):
    summary_file = tmp_path / "summary.json"
    flags = ("--data_dir", digits, "--max_batches", 150, "--lr", 0.05, "--log_interval", 50)
    done = run_main("param_server", *flags, "--summary_json", summary_file, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(summary_file.read_text())
    assert re.search(r"^Epoch 1: Accuracy 0\.\d{4}, ", done.stdout, re.M)
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("Rank")} == {"1", "2"}
    assert summary["test_accuracy"] > 0.8
    assert summary["dataset"] == "mnist" and summary["images_per_second"] > 0
    assert summary["updates"] == 300 and summary["staleness_max"] > 0


@pytest.mark.quick
def test_the_figures_of_staleness():
    """Three gradients were computed from the newest weights, and one from weights that lacked two updates."""
    with package_on_path("param_server"):
        from glue import report
    assert report.staleness_figures({0: 3, 2: 1}) == {"staleness_mean": 0.5, "staleness_max": 2}
    assert report.staleness_figures({}) == {"staleness_mean": 0.0, "staleness_max": 0}


def test_what_crosses_the_wire(few_digits):
    """Difference 4: in `remote` images and predictions are sent, not 9.6 MB of gradients and weights for an assert."""
    flags = ("--data_dir", few_digits, "--world_size", 2, "--max_batches", 20)
    done = run_script("bench/bytes_per_step.py", "param_server", *flags)
    assert done.returncode == 0, done.stderr
    tensors = 32 * (28 * 28 + 2 * 10) * 4  # images; log-probabilities and their gradients
    assert tensors < BYTES.per_step(done.stdout) < tensors + 30_000


def test_more_callers_than_rpc_threads_and_checkpoints_end_without_a_hang(tmp_path, few_digits):
    """If trainers that wait blocked the server's RPC threads, none would be left for those that they wait for."""
    options = ("job.rpc_options()", "job.rpc_options(num_worker_threads=2)")
    flags = ("--mode", "sync", "--world_size", 9, "--batch_size", 8, "--max_batches", 20, "--data_dir", few_digits)
    flags = (*flags, "--lr", 0.003, "--checkpoint", tmp_path / "c.pt", "--evaluations", 4)
    done = run_script(changed_package("param_server", tmp_path, "main.py", *options), *flags, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert updates_in(tmp_path / "c.pt") == 20


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.quick
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


@pytest.mark.quick
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


# ------------------------------------------------------------------------------------------------- checkpoints


def updates_in(checkpoint):
    return torch.load(checkpoint, weights_only=True)["state"]["progress"]["updates"]


def assert_same_weights(checkpoint, expected_checkpoint):
    found, expected = (torch.load(file, weights_only=True)["state"] for file in (checkpoint, expected_checkpoint))
    torch.testing.assert_close(found["model"], expected["model"], rtol=0, atol=0)
    for place, state in expected["optimizer"]["state"].items():
        momentum = found["optimizer"]["state"][place]["momentum_buffer"]
        torch.testing.assert_close(momentum, state["momentum_buffer"], rtol=0, atol=0)


def test_killed_and_resumed_ends_where_an_unbroken_run_ends(tmp_path, few_digits):
    """To the bit, with dropout. The order of pushes, the moment of the kill, measuring and saving make no difference.

    A measurement falls between two updates, after as many batches of each trainer. From a copy of the checkpoint, one
    trainer does what is left of the epoch of three.
    """
    unbroken, broken, copy, summary = (tmp_path / name for name in ("unbroken.pt", "broken.pt", "copy.pt", "s.json"))
    flags = ("--data_dir", few_digits, "--mode", "sync", "--momentum", 0.5, "--summary_json", summary)
    three = (*flags, "--world_size", 4)
    assert run_main("param_server", *three, "--checkpoint", unbroken).returncode == 0
    with Program("param_server/main.py", *three, "--checkpoint", broken, "--evaluations", 8) as running:
        deadline = time.monotonic() + 120
        while not broken.exists():
            assert time.monotonic() < deadline and running.poll() is None, running.text()
            time.sleep(0.02)
    shutil.copy(broken, copy)
    at = updates_in(broken)
    assert at in (5, 10, 15, 20, 25, 30)
    resumed = run_main("param_server", *three, "--checkpoint", broken, "--evaluations", 8, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"Going on after update {at}, with 0 of 1 epochs done." in resumed.stdout
    measured = re.findall(r"^Epoch 1, update (\d+): Accuracy", resumed.stdout, re.M)
    assert measured == [str(update) for update in range(at + 5, 34, 5)]
    assert updates_in(broken) == updates_in(unbroken) == 34
    assert_same_weights(broken, unbroken)

    resumed = run_main("param_server", *flags, "--world_size", 2, "--checkpoint", copy, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(summary.read_text())["images_applied"] == [3_200]
