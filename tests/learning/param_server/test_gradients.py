"""Several trainers and a server over real RPC: each gradient equals that of one process; the published code fails."""

import re

import pytest

from programs import run_script

FLAGS = ("--dataset", "synthetic", "--no_dropout", "--batch_size", "8")


@pytest.mark.parametrize("trainers, batches", [pytest.param(3, 8), pytest.param(8, 6, marks=pytest.mark.slow)])
def test_every_gradient_of_concurrent_trainers_is_right(trainers, batches):
    job = ("RecordingServer", *FLAGS, "--world_size", trainers + 1, "--max_batches", batches)
    done = run_script("tests/learning/param_server/recording_job.py", *job, timeout=200)
    assert done.returncode == 0, done.stderr
    line = re.search(r"checked (\d+) gradients, (\d+) late, worst difference (\S+)", done.stdout)
    checked, late, worst = line.groups()
    assert int(checked) == trainers * batches
    assert int(late) > trainers  # training steps must have overlapped for this test to show anything
    assert float(worst) < 1e-6


@pytest.mark.slow
def test_the_tutorials_way_fails_and_the_failure_is_told():
    done = run_script(
        "tests/learning/param_server/recording_job.py", "TutorialServer", *FLAGS, "--world_size", 5, "--max_batches", 60
    )
    assert done.returncode == 1
    assert re.search(r"rank \d \(\w+\): .*modified by an inplace operation", done.stderr), done.stderr
