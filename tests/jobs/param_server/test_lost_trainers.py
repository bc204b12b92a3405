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


def test_a_killed_trainers_batches_go_to_the_others():
    summary = lost_trainers.run_case("replica", {2: ("SIGKILL", 0.3)})
    assert summary["lost"] == [2]


@pytest.mark.slow
def test_the_mean_goes_on_without_one_that_fails():
    summary = lost_trainers.run_case("sync", {1: ("exception", 0.2), 4: ("SIGKILL", 0.5)})
    assert summary["lost"] == [1, 4]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replica", "remote"])
@pytest.mark.draw(1)
def test_one_that_wakes_up_finds_itself_dropped(mode):
    # With this pause the others are still at work when it continues.
    summary = lost_trainers.run_case(mode, {3: ("nap", 0.3)}, pause=0.03)
    assert summary["lost"] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))  # tools/soak_lost.py runs more cases
@pytest.mark.draw(2)
def test_trainers_are_lost_at_any_moment(number):
    lost_trainers.run_case(*lost_trainers.draw_case(number))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["replica", "sync"])
@pytest.mark.draw(1)
def test_trainers_die_while_rank_0_saves(tmp_path, mode):
    """Seven of eight, at different moments. Rank 0 spends most of the time on saving and on finding what is left."""
    faults = {rank: ("SIGKILL", 0.2 * rank) for rank in range(2, 9)}  # the job takes several times as long
    flags = ("--checkpoint", tmp_path / "c.pt", "--batch_size", 40, "--lr", 40)
    summary = lost_trainers.run_case(mode, {0: ("slow", 0), **faults}, flags, trainers=8, epochs=20)
    assert summary["lost"] == [*range(2, 9)]


@pytest.mark.slow
def test_without_the_last_trainer_the_job_ends():
    everybody = ",".join(f"{rank}:SIGKILL:0.5" for rank in range(1, 5))
    flags = ("--mode", "replica", "--world_size", 5, "--epochs", 3, "--batch_size", 4, "--lr", 4)
    job = (lost_trainers.IMAGES, 0.01, 4.0, everybody, *flags, "--on_lost", "continue")
    done = run_script("tests/jobs/param_server/counting_job.py", *job, timeout=100)
    assert_one_line_error(done, 1, "lost rank")


@pytest.mark.slow
@pytest.mark.draw(2, "learns")
def test_the_digits_are_learned_without_a_lost_trainer(digits, tmp_path):
    """With the real network and one of three trainers killed, every image is applied once, and the accuracy is high."""
    summary = tmp_path / "s.json"
    # Not `overlap`, whose staler gradients learn at a rate that depends on the load of the machine.
    flags = ("--mode", "replica", "--world_size", 4, "--batch_size", 16, "--lr", 0.05)
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
    "mode, updates, more", [("remote", 300, ",3:SIGKILL:0.2"), ("replica", 300, ",3:SIGKILL:0.2"), ("sync", 75, "")]
)
@pytest.mark.draw(1)
def test_a_restart_gets_past_an_evaluation_in_which_the_server_was_killed(tmp_path, mode, updates, more):
    """Epoch 2 begins again from the checkpoint of epoch 1. Also tested with a lost trainer."""
    summary_file = tmp_path / "s.json"
    flags = ("--mode", mode, "--world_size", lost_trainers.TRAINERS + 1, "--epochs", 2, "--batch_size", 4, "--lr", 4)
    flags = (*flags, "--max_restarts", 1, "--on_lost", "continue", "--summary_json", summary_file)
    flags = (*flags, "--checkpoint", tmp_path / "c.pt")
    job = (lost_trainers.IMAGES, 0.004, 4.0, f"0:evaluation:0{more}", *flags)
    done = run_script("tests/jobs/param_server/counting_job.py", *job, timeout=150)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert f"Going on after update {updates}, with 1 of 2 epochs done." in done.stdout, output
    assert ("lost rank 3 (trainer3): killed by SIGKILL" in output) == bool(more), output
    summary = json.loads(summary_file.read_text())
    assert summary["images_applied"] == [lost_trainers.IMAGES] * 2 and summary["updates"] == 2 * updates, output
    assert re.findall(r"^Epoch (\d)", done.stdout, re.M) == ["1", "2"], output
    each = 0.25 if mode == "sync" else 1.0
    counted = re.findall(r"counted (\d+) never, min (\S+), max (\S+),", output)
    # The restarted process counts from the beginning, with what is in the checkpoint.
    expected = [(0, each, each), (0, 2 * each, 2 * each)]
    assert [(int(never), float(least), float(most)) for never, least, most in counted] == expected, output
