"""param_server as a user runs it: it learns, bad input is refused, a resumed run goes on as if it had not stopped."""

import json
import re
import shutil

import pytest
import torch

from helpers import assert_one_line_error, load_bench, noise, package_on_path, write_mnist
from jobs import RunningJob
from patches import main_with
from processes import wait_until
from programs import run_main, run_script


def test_a_run_learns_and_reports_its_figures_and_what_crosses_the_wire(tmp_path, digits_of_size):
    """Difference 4: in `remote` images and predictions are sent, not 9.6 MB of gradients and weights for an assert."""
    summary_file = tmp_path / "summary.json"
    flags = ("--data_dir", digits_of_size(9_600, 1_000), "--summary_json", summary_file)
    flags += ("--max_batches", 150, "--lr", 0.05, "--momentum", 0.5, "--log_interval", 50)
    done = run_script("bench/bytes_per_step.py", "param_server", *flags, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")
    tensors = 32 * (28 * 28 + 2 * 10) * 4  # images; log-probabilities and their gradients
    assert tensors < load_bench("bytes_per_step").per_step(done.stdout) < tensors + 30_000
    summary = json.loads(summary_file.read_text())
    assert re.search(r"^Epoch 1: Accuracy 0\.\d{4}, ", done.stdout, re.M)
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("Rank")} == {"1", "2"}
    assert summary["test_accuracy"] > 0.8
    assert summary["dataset"] == "mnist" and summary["images_per_second"] > 0
    assert summary["updates"] == 300 and summary["staleness_max"] > 0
    losses = summary["curves"]["loss"]
    assert losses[0] == sorted(losses[0]) and len(losses[0]) == 6


@pytest.mark.quick
def test_the_figures_of_staleness():
    """Three gradients were computed from the newest weights, and one from weights that lacked two updates."""
    with package_on_path("param_server"):
        from counts import Counts
    counts = Counts()
    assert counts.staleness() == {"staleness_mean": 0.0, "staleness_max": 0}
    for version in (0, 1, 0, 3):
        counts.add_update((0, 1, version, 32))
    assert counts.staleness() == {"staleness_mean": 0.5, "staleness_max": 2}


# ------------------------------------------------------------------------------------------------- bad input


def trainer_1_prepares_its_images_for_long(time, replica):
    load_digits = replica.load_digits

    def load_late(*which, **how):
        if replica.rpc.get_worker_info().id == 1:
            time.sleep(600)
        return load_digits(*which, **how)

    replica.load_digits = load_late


def test_unusable_data_ends_the_whole_job_with_status_1(tmp_path, few_digits):
    """Difference 11: in the tutorial the child's failure is ignored, and the exit status is 0.

    Here a trainer finds that a file is damaged, which rank 0 has not read. The other one still prepares its images.
    """
    main = main_with("param_server", tmp_path, trainer_1_prepares_its_images_for_long)
    folder = shutil.copytree(few_digits, tmp_path / "digits")
    (folder / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01")
    done = run_script(main, "--data_dir", folder, "--mode", "replica", timeout=60)
    assert_one_line_error(done, 1, "rank 2 (trainer2)", "train-labels-idx1-ubyte cannot be read", "delete both")


def test_no_network_names_both_ways_out(tmp_path, monkeypatch):
    """In the words of the tutorials' own download, which needs a network that is not there."""
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with package_on_path("param_server"):
        import data
    with pytest.raises(ValueError, match=r"cannot be downloaded.*put its four files.* --dataset synthetic"):
        data.load_digits("mnist", str(tmp_path / "data"), 1, train=False, download=True)


def does_not_use_a_parameter(net):
    forward = net.Net.forward

    def forward_without_the_last_bias(self, x):
        self.fc2.forward = lambda x: net.F.linear(x, self.fc2.weight)
        return forward(self, x)

    net.Net.forward = forward_without_the_last_bias


def test_a_gradient_that_does_not_arrive_is_noticed(tmp_path, few_digits):
    """Difference 4."""
    main = main_with("param_server", tmp_path, does_not_use_a_parameter)
    done = run_script(main, "--data_dir", few_digits, "--world_size", 2)
    assert done.returncode == 1
    assert "RuntimeError: rank 1's backward pass produced no gradient for fc2.bias" in done.stderr, done.stderr


def test_training_that_diverges_ends_in_one_line(tmp_path, few_digits):
    """Difference 17."""
    summary = tmp_path / "s.json"
    done = run_main("param_server", "--data_dir", few_digits, "--lr", "1e30", "--summary_json", summary, timeout=100)
    assert_one_line_error(done, 1, "step ", " is ", "training has diverged, try a lower --lr")
    assert not summary.exists()


# ------------------------------------------------------------------------------------------------- checkpoints


def updates_in(checkpoint):
    return torch.load(checkpoint, weights_only=True)["state"]["progress"]["updates"]


def test_resumed_ends_where_an_unbroken_run_ends(tmp_path):
    """To the bit, with dropout. The order of answers, the moment of the end, measuring and saving change nothing.

    The checkpoints are copies of one that the unbroken run writes within its epoch. A measurement falls between two
    updates, after as many batches of each trainer. From the second copy, one trainer does what is left of the epoch.
    """
    unbroken, broken, copy, summary = (tmp_path / name for name in ("unbroken.pt", "broken.pt", "copy.pt", "s.json"))
    write_mnist(tmp_path / "noise", noise(320), noise(64))  # 320 images, so 160 batches, of which three are an update
    flags = ("--data_dir", tmp_path / "noise", "--batch_size", 2, "--lr", 0.003, "--momentum", 0.5)
    flags = (*flags, "--mode", "sync", "--summary_json", summary)
    three = (*flags, "--world_size", 4)
    with RunningJob("param_server", "spawned", [*three, "--checkpoint", unbroken, "--evaluations", 8]) as job:
        wait_until(unbroken.exists, 120, job.text)
        shutil.copy(unbroken, broken)
        assert job.wait(120) == [0], job.text()
    measured = re.findall(r"^Epoch 1: Accuracy .* (\d+) updates", job.text(), re.M)
    assert measured == [str(update) for update in (*range(7, 54, 7), 54)]
    shutil.copy(broken, copy)
    at = updates_in(broken)
    assert at in range(7, 50, 7)
    resumed = run_main("param_server", *three, "--checkpoint", broken, "--resume")  # without further measurements
    assert resumed.returncode == 0, resumed.stderr
    assert f"Going on after update {at}, with 0 of 1 epochs done." in resumed.stdout
    assert updates_in(broken) == updates_in(unbroken) == 54
    found, expected = (torch.load(file, weights_only=True)["state"] for file in (broken, unbroken))
    torch.testing.assert_close(found["model"], expected["model"], rtol=0, atol=0)
    momentum, expected_momentum = (each["optimizer"]["state"][0]["momentum_buffer"] for each in (found, expected))
    torch.testing.assert_close(momentum, expected_momentum, rtol=0, atol=0)

    resumed = run_main("param_server", *flags, "--world_size", 2, "--checkpoint", copy, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    figures = json.loads(summary.read_text())
    assert figures["images_applied"] == [320]
    assert [update["batches"] for update in figures["update_list"]] == [[batch] for batch in range(3 * at, 160)]
