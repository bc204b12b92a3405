"""--on_lost continue: trainers are lost at any moment, and every batch of every epoch is applied exactly once.

`python tools/soak_faults.py continue` runs more cases.
"""

import pytest

from faults import lose_trainers


@pytest.mark.quick
def test_a_killed_trainers_batches_go_to_the_others(tmp_path):
    summary = lose_trainers(tmp_path, "replica", {2: 0.3})
    assert summary["lost"] == [2]


def test_the_mean_goes_on_without_two_of_three(tmp_path):
    flags = ("--evaluations", 4, "--checkpoint", tmp_path / "c.pt")
    summary = lose_trainers(tmp_path, "sync", {1: 0.2, 3: 0.5}, flags, trainers=3)
    assert summary["lost"] == [1, 3]


def test_trainers_die_while_rank_0_saves(tmp_path):
    """Seven of eight, at different moments. Rank 0 spends much of the time on measuring and saving."""
    kills = {rank: 0.2 * rank for rank in range(2, 9)}
    flags = ("--evaluations", 10, "--checkpoint", tmp_path / "c.pt")
    summary = lose_trainers(tmp_path, "bounded", kills, flags, trainers=8)
    assert summary["lost"] == [*range(2, 9)]
