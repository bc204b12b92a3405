"""--on_lost continue: trainers are lost at any moment, and every batch of every epoch is applied exactly once.

`python tools/soak_faults.py continue` runs more cases.
"""

import os
import signal

import pytest

import lost_trainers
from helpers import assert_one_line_error
from processes import ranks_of
from programs import Program


@pytest.mark.quick
def test_a_killed_trainers_batches_go_to_the_others(tmp_path):
    summary = lost_trainers.run_case(tmp_path, "replica", {2: 0.3})
    assert summary["lost"] == [2]


def test_the_mean_goes_on_without_two_of_three(tmp_path):
    flags = ("--evaluations", 4, "--checkpoint", tmp_path / "c.pt")
    summary = lost_trainers.run_case(tmp_path, "sync", {1: 0.2, 3: 0.5}, flags, trainers=3)
    assert summary["lost"] == [1, 3]


def test_trainers_die_while_rank_0_saves(tmp_path):
    """Seven of eight, at different moments. Rank 0 spends much of the time on measuring and saving."""
    kills = {rank: 0.2 * rank for rank in range(2, 9)}
    flags = ("--evaluations", 10, "--checkpoint", tmp_path / "c.pt")
    summary = lost_trainers.run_case(tmp_path, "bounded", kills, flags, trainers=8)
    assert summary["lost"] == [*range(2, 9)]


def test_without_a_trainer_the_job_ends_and_names_it(few_digits):
    flags = ("--data_dir", few_digits, "--mode", "overlap", "--epochs", 1000, "--log_interval", 5)
    with Program("param_server/main.py", *flags, "--on_lost", "continue") as running:
        assert running.wait_for_text(r"Rank \d+ training batch", 120), running.text()
        pids = ranks_of(running.pid, 3)
        for victim in (1, 2):
            os.kill(pids[victim], signal.SIGKILL)
        done = running.result(60)
    assert_one_line_error(done, 1, "lost rank", "(trainer")
