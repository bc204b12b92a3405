"""--on_lost continue: trainers are lost at any moment, and every image of every epoch is applied exactly once."""

import json
import os
import re
import signal

import pytest

import lost_trainers
from helpers import assert_one_line_error
from processes import ranks_of
from programs import run_script, start_main
from sampling import some_of


def test_a_killed_trainers_batches_go_to_the_others():
    summary = lost_trainers.run_case("async, two servers", {1: ("SIGKILL", 0.3)})
    assert summary["lost"] == [3]


@pytest.mark.slow
def test_the_mean_goes_on_without_one_that_fails():
    summary = lost_trainers.run_case("sync", {0: ("exception", 0.2), 3: ("SIGKILL", 0.5)})
    assert summary["lost"] == [1, 4]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "remote"])
def test_one_that_wakes_up_finds_itself_dropped(mode):
    summary = lost_trainers.run_case(
        mode, {2: ("nap", 0.3)}, pause=0.05
    )  # the others are still at work when it continues
    assert summary["lost"] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("number", some_of(range(4), 2))  # tools/soak_lost.py runs more cases
def test_trainers_are_lost_at_any_moment(number):
    lost_trainers.run_case(*lost_trainers.draw_case(number))


@pytest.mark.slow
def test_without_the_last_trainer_the_job_ends():
    everybody = ",".join(f"{rank}:SIGKILL:0.5" for rank in range(1, 5))
    flags = ("--mode", "replica", "--world_size", 5, "--epochs", 3, "--batch_size", 4, "--lr", 4)
    job = (lost_trainers.IMAGES, 0.01, 4.0, everybody, *flags, "--on_lost", "continue")
    done = run_script("tests/jobs/param_server/counting_job.py", *job, timeout=100)
    assert_one_line_error(done, 1, "lost rank")


@pytest.mark.slow
def test_the_digits_are_learned_without_a_lost_trainer(digits, tmp_path):
    """With the real network and one of three trainers killed, every image is applied once, and the accuracy is high."""
    summary = tmp_path / "s.json"
    flags = ("--mode", "replica", "--overlap", "--world_size", 4, "--batch_size", 16, "--lr", 0.03)
    flags = (*flags, "--log_interval", 20, "--data_dir", digits, "--on_lost", "continue", "--summary_json", summary)
    process = start_main("param_server", *flags)
    assert process.wait_for_text("training batch", 120), process.text()
    os.kill(ranks_of(process.pid)[2], signal.SIGKILL)
    done = process.result(200)
    assert done.returncode == 0 and "The job finished without rank 2 (trainer2)." in done.stdout, done
    figures = json.loads(summary.read_text())
    assert figures["lost"] == [2] and figures["images_applied"] == [9_600] and figures["test_accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, servers, updates, more",
    [("remote", 1, 300, ",3:SIGKILL:0.2"), ("async, two servers", 2, 300, ",3:SIGKILL:0.2"), ("sync", 1, 75, "")],
)
def test_a_restart_gets_past_an_evaluation_in_which_the_server_was_killed(tmp_path, mode, servers, updates, more):
    """The checkpoint is that of the epoch's last update, so no batch is left. Also tested with a lost trainer."""
    summary_file, size = tmp_path / "s.json", servers + lost_trainers.TRAINERS
    flags = (
        *lost_trainers.MODES[mode],
        "--world_size",
        size,
        "--epochs",
        2,
        "--batch_size",
        4,
        "--lr",
        4,
        "--max_restarts",
        1,
    )
    flags = (*flags, "--on_lost", "continue", "--checkpoint", tmp_path / "c.pt", "--checkpoint_every", updates)
    job = (lost_trainers.IMAGES, 0.004, 4.0, f"0:evaluation:0{more}", *flags, "--summary_json", summary_file)
    done = run_script("tests/jobs/param_server/counting_job.py", *job, timeout=150)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and f"Going on from update {updates}, epoch 1" in done.stdout, output
    assert (f"lost rank 3 (trainer{4 - servers}): killed by SIGKILL" in output) == bool(more), output
    summary = json.loads(summary_file.read_text())
    assert summary["images_applied"] == [lost_trainers.IMAGES] * 2 and summary["updates"] == 2 * updates, output
    assert re.findall(r"^Epoch (\d)", done.stdout, re.M) == ["1", "2"], output
    counted = re.findall(r"counted (\d+) never, min (\S+), max (\S+),.*\nnot once: (\d+), the first is (\d+)", output)
    each = 0.25 if mode == "sync" else 1.0
    for epoch, (never, least, most, uneven, first) in enumerate(counted):
        if servers > 1 and epoch == 0:  # the killed trainer may have left a push that only the first server has applied
            assert int(uneven) <= lost_trainers.BATCH and int(first) >= lost_trainers.IMAGES // servers, output
        else:
            assert (int(never), float(least), float(most)) == (0, each, each), output
    assert len(counted) == 2, output
