"""With --on_lost continue, the agent goes on without a lost observer, in every mode."""

import json
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch

from faults import copy_with_mistake
from helpers import load_oracle
from jobs import RunningJob

oracle = load_oracle("rl_rpc")
make_agent = oracle.make_agent  # a fixture
MODES = list(oracle.main.MODES)
STATE = np.zeros(4, dtype=np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_the_others_play_and_learn_on_without_an_observer(make_agent, mode):
    """One of three observers fails during its second episode. `report_lost` stands for the job, which drops it."""
    lost = []

    def report_lost(ob_id, error):
        lost.append((ob_id, str(error)))
        assert agent.on_lost(ob_id) == "its episode is thrown away"

    agent = make_agent(3, mode, report_lost=report_lost)
    failing = agent.ob_rrefs[2].value
    agent.run_episode()
    agent.finish_episode()

    def fail(action):
        raise ValueError("injected fault")

    failing.step = fail
    for _ in range(12):
        agent.run_episode()
        agent.finish_episode()
    agent.calls.wait_for_all()
    assert lost == [(2, "injected fault")] and agent.learner.episodes == 13
    assert agent.calls.idle(agent.ob_rrefs) == [1, 3]
    assert agent.on_lost(1) == ""  # no episode runs, so none is thrown away


def test_a_lost_observer_leaves_the_batch_that_others_wait_in(make_agent):
    agent = oracle.begin(make_agent(3, "batched"))
    first, second = (agent.select_action(ob_id, STATE, None) for ob_id in (1, 2))
    assert not first.done() and not second.done()
    agent.on_lost(3)  # observer 3 has not asked yet
    assert first.done() and second.done()
    agent.select_action(1, STATE, 1.0)
    agent.on_lost(1)  # observer 1 waits for an answer: its state must leave the batch
    assert agent.select_action(2, STATE, 1.0).done()
    assert [len(agent.trajectories[ob_id].actions) for ob_id in (1, 2)] == [1, 2]


def test_late_calls_of_a_dropped_observer_are_refused(make_agent):
    """A stopped observer, which was dropped after 8 s, may be continued later and call the agent again."""
    step, packed, batched = (oracle.begin(make_agent(2, mode)) for mode in ("step", "packed", "batched"))
    calls = (
        lambda: step.select_action(2, STATE),
        lambda: step.report_reward(2, 1.0),
        lambda: packed.select_action(2, STATE, 1.0),
        lambda: batched.select_action(2, STATE, None),
        lambda: batched.select_action(2, STATE, 1.0),
    )
    for agent in (step, packed, batched):
        agent.on_lost(2)
    for call in calls:
        with pytest.raises(ValueError, match=r"^observer2 was lost; the others play on without it$"):
            call()
    assert batched.select_action(1, STATE, None).done()  # the refused calls are not part of a batch


def test_an_observer_that_is_lost_just_before_its_episode_begins_is_not_waited_for(make_agent):
    """The job reports a loss on a thread of its own, so perhaps between these two calls."""
    calls = make_agent(2, "rollout").calls
    assert calls.idle([1, 2]) == [1, 2]
    calls.on_lost(2)
    silent, played = torch.futures.Future(), torch.futures.Future()
    calls.add(2, silent)
    calls.add(1, played)
    played.set_result("an episode")
    answers = {}
    waiting = threading.Thread(target=lambda: answers.update(calls.as_completed()))
    waiting.start()
    waiting.join(5)
    ended = not waiting.is_alive()
    silent.set_result(None)  # so that the thread ends in any case
    assert ended and answers == {1: "an episode"}


@pytest.mark.parametrize("ends", ["with its episode", "with an error"])
def test_a_late_episode_of_a_dropped_observer_is_not_taken(make_agent, ends):
    """In `rollout` and `async`: if a dropped observer returns an episode or an error later, it is not used."""
    over, late = threading.Event(), threading.Event()
    agent = make_agent(2, "rollout", report_lost=lambda *_: pytest.fail("a dropped observer was reported again"))
    stopped, plain = agent.ob_rrefs[2].value, agent.ob_rrefs[2].value.run_episode

    def run_episode(*arguments):
        if not over.is_set():
            agent.on_lost(2)
        over.wait(20)
        late.set()
        if ends == "with an error":
            raise ValueError("a late call was refused")
        return plain(*arguments)

    stopped.run_episode = run_episode
    agent.run_episode()
    assert not late.is_set()  # it has returned without the second observer
    reward = sum(agent.trajectories[1].rewards)
    assert agent.finish_episode() == reward and agent.learner.env_steps == reward
    over.set()
    assert late.wait(20)
    agent.run_episode()
    assert agent.finish_episode() == sum(agent.trajectories[1].rewards) == agent.learner.env_steps - reward


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "async"])
def test_an_episode_that_has_arrived_counts_although_its_observer_is_lost_then(make_agent, mode):
    agent = make_agent(2, mode)
    agent.run_episode()
    played = sum(len(trajectory.actions) for trajectory in agent.trajectories.values())
    assert agent.on_lost(2) == ""  # nothing is said about its episode, so it must not be thrown away
    agent.finish_episode()
    assert agent.learner.env_steps == played
    agent.run_episode()
    agent.finish_episode()
    assert agent.learner.env_steps == played + len(agent.trajectories[1].actions)


# ---- whole jobs ------------------------------------------------------------------------------------------------------


def play_and_lose(tmp_path, way, mode, number, *, lost=(2,), episodes=60):
    """Kill or stop some of three observers during a run; return (exit statuses, lines on stderr, output, summary)."""
    summary = tmp_path / "summary.json"
    flags = ["--on_lost", "continue", "--mode", mode, "--max_episodes", str(episodes), "--log_interval", "1"]
    flags += ["--transport", "uv", "--eval_episodes", "1", "--summary_json", str(summary)]
    with RunningJob("rl_rpc", way, flags, fault=(0, "none", 0)) as job:
        assert job.wait_for_text("Episode 3", 90), job.text()
        for pid in [job.pid_of(rank) for rank in lost]:  # find all of them before the first is killed
            os.kill(pid, number)
        statuses, text = job.wait(90), job.text()
        assert way == "terminals" or not job.survivors()
        errors = [line for line in job.errors().splitlines() if line]
    return statuses, errors, text, json.loads(summary.read_text()) if summary.exists() else None


SLOW = pytest.mark.slow
CASES = [
    (way, mode, number)
    for way in ("spawned", "terminals")
    for mode in ("step", "batched", "async")
    for number in (signal.SIGKILL, signal.SIGSTOP)
    # Each way once. The first test tries all modes without processes, and tools/soak_lost.py all combinations.
    if (way, number) == ("spawned", signal.SIGKILL) or (way, mode) == ("terminals", "async")
]


@SLOW
@pytest.mark.parametrize("way, mode, number", CASES)
@pytest.mark.draw(2)
def test_a_job_goes_on_without_an_observer(tmp_path, way, mode, number):
    statuses, errors, text, summary = play_and_lose(tmp_path, way, mode, number)
    gone = -number if number == signal.SIGKILL else None
    assert statuses == ([0] if way == "spawned" else [0, 0, gone]), text
    (line,) = errors
    # Without the last words if it had just finished its episode, while others still played.
    assert re.fullmatch(r"rl_rpc: lost rank 2 \(observer2\): [^;]*(; its episode is thrown away)?", line), line
    assert "The job finished without rank 2 (observer2)." in text
    assert summary["lost"] == [2] and summary["episodes"] == 60


@SLOW
@pytest.mark.parametrize("mode", ["step", "packed"])
@pytest.mark.draw(1)
def test_a_lost_observer_that_wakes_up_causes_no_traceback(mode):
    """It goes on with its episode, so it calls the agent, which has forgotten it."""
    flags = ["--on_lost", "continue", "--mode", mode, "--max_episodes", "1000000", "--reward_threshold", "1e9"]
    with RunningJob("rl_rpc", "terminals", [*flags, "--log_interval", "1"], fault=(0, "none", 0)) as job:
        assert job.wait_for_text("Episode 3", 90), job.text()
        os.kill(job.pid_of(2), signal.SIGSTOP)
        assert job.wait_for_text("lost rank 2", 30), job.text()
        os.kill(job.pid_of(2), signal.SIGCONT)
        assert job.processes[2].wait(30) == 1, job.text()
        played = job.text().count("Episode ")
        while job.text().count("Episode ") < played + 5:  # the others play on, and have printed what there is to print
            assert job.processes[0].poll() is None, job.text()
            time.sleep(0.05)
        agent, _, observer = (process.errors() for process in job.processes)
        assert agent.startswith("rl_rpc: lost rank 2 (observer2): ") and len(agent.splitlines()) == 1, job.text()
        assert len(observer.splitlines()) == 1 and "observer2" in observer, job.text()


@SLOW
@pytest.mark.parametrize("mode", ["batched"])
def test_without_the_last_observer_a_job_ends(tmp_path, mode):
    statuses, errors, text, summary = play_and_lose(
        tmp_path, "spawned", mode, signal.SIGKILL, lost=(1, 2), episodes=10**6
    )
    assert statuses == [1] and summary is None
    assert "finished" not in text and any("lost rank" in line for line in errors)


@SLOW
@pytest.mark.parametrize("mode", ["batched"])
def test_an_error_in_the_agent_ends_the_job_and_names_it(tmp_path, mode):
    """All observers of the batch wait for the call that fails. None of them may be blamed, or waited for."""
    mistake = ("batched.py", "np.stack(", "np.stak(")
    main = copy_with_mistake("rl_rpc", tmp_path, *mistake)
    flags = ["--world_size", "4", "--mode", mode, "--on_lost", "continue", "--transport", "uv"]
    with RunningJob("rl_rpc", "spawned", flags, script=main) as job:
        assert job.wait(30) == [1], job.text()
        assert "rank 0 (agent): AttributeError: module 'numpy' has no attribute 'stak'" in job.errors()
        assert job.errors().count("Traceback") == 1 and "lost rank 1" not in job.errors(), job.text()
