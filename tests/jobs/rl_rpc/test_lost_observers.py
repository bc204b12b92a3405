"""With --on_lost continue, the agent goes on without a lost observer."""

import json
import os
import re
import signal

import pytest
import torch

from helpers import package_on_path
from jobs import RunningJob
from patches import main_with

with package_on_path("rl_rpc"):
    from glue.open_calls import OpenCalls

GO_ON = ["--on_lost", "continue", "--log_interval", "1", "--eval_episodes", "1"]


def start(mode, *flags, script=None):
    """Start a job with two observers."""
    return RunningJob("rl_rpc", "spawned", [*GO_ON, "--mode", mode, *flags], script=script)


def lose(job, rank):
    """Kill an observer when all play, and return when its loss is printed. Return the process ids of all ranks."""
    assert job.wait_for_text("Episode 3", 90), job.text()
    pids = [job.pid_of(each) for each in range(3)]
    os.kill(pids[rank], signal.SIGKILL)
    line = rf"rl_rpc: lost rank {rank} \(observer{rank}\): its process has ended; the others go on\n"
    assert job.wait_for_text(line, 20), job.text()
    return pids


def test_a_job_goes_on_without_an_observer(tmp_path):
    summary = tmp_path / "summary.json"
    flags = ["--max_episodes", 150, "--reward_threshold", 1e9, "--summary_json", summary]
    with start("vector", *flags) as job:
        lose(job, 2)
        assert job.wait(200) == [0] and not job.left_over(), job.text()
        assert len(job.errors().splitlines()) == 1
        assert "The job finished without rank 2 (observer2)." in job.text()
    figures = json.loads(summary.read_text())
    assert figures["lost"] == [2] and figures["episodes"] == 150


def test_without_the_last_observer_a_job_ends():
    with start("async", "--max_episodes", 10**6, "--reward_threshold", 1e9) as job:
        pids = lose(job, 2)
        played = len(re.findall("Episode", job.text()))
        assert job.wait_for_text(rf"Episode {played + 20}\b", 60), job.text()
        os.kill(pids[1], signal.SIGKILL)
        assert job.wait(15) == [1] and not job.left_over(), job.text()
        assert "lost rank 1 (observer1)" in job.errors() and "finished" not in job.text()


def test_after_a_loss_the_death_of_the_agent_is_named():
    with start("rollout", "--max_episodes", 10**6, "--reward_threshold", 1e9) as job:
        pids = lose(job, 2)
        os.kill(pids[0], signal.SIGKILL)
        assert job.wait(15) == [1] and not job.left_over(), job.text()
        assert job.errors().endswith("lost rank 0 (agent): killed by SIGKILL\n"), job.errors()


def fails_to_learn(program, os, mark):
    learn = program.Learner.learn

    def learn_or_fail(self, trajectories, loss):
        if os.path.exists(mark):
            loss.backwards()
        return learn(self, trajectories, loss)

    program.Learner.learn = learn_or_fail


def test_error_of_the_agent_after_a_loss_is_not_blamed_on_observers(tmp_path):
    mark = tmp_path / "mark"
    main = main_with("rl_rpc", tmp_path, fails_to_learn, mark=str(mark))
    with start("rollout", "--max_episodes", 10**6, "--reward_threshold", 1e9, script=main) as job:
        lose(job, 2)
        mark.touch()
        assert job.wait(60) == [1] and not job.left_over(), job.text()
        errors = job.errors()
    assert errors.count("Traceback (most recent call last)") == 1, errors
    cause = "AttributeError: 'Tensor' object has no attribute 'backwards'"
    assert re.search(rf"^rl_rpc: rank 0 \(agent\): {cause}", errors, re.MULTILINE), errors
    assert "lost rank 1" not in errors, errors


@pytest.mark.quick
@pytest.mark.timeout(30)
def test_an_observer_that_is_lost_just_before_its_episode_begins_is_not_waited_for():
    """The job reports a loss on a thread of its own, so perhaps between idle() and add()."""
    calls = OpenCalls()
    assert calls.idle([1, 2]) == [1, 2]
    calls.on_lost(2)
    silent, played = torch.futures.Future(), torch.futures.Future()
    calls.add(2, silent)
    calls.add(1, played)
    played.set_result("an episode")
    assert sorted(calls.answers()) == [(1, None, "an episode"), (2, None, None)]
    assert calls.idle([1, 2]) == [1] and not calls.open
    silent.set_result("a late answer")
    calls.add(1, played)
    assert calls.results() == {1: "an episode"}  # the late answer does not count
