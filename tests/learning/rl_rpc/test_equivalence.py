"""Every mode of rl_rpc plays and learns what a plain loop in one process does."""

import json
import os

import gymnasium as gym
import pytest
import torch

from helpers import ROOT, load_module, load_oracle
from rl_runs import EPISODES, SEED, play

oracle = load_oracle("rl_rpc")
noted_envs = load_module(ROOT / "tests" / "learning" / "rl_rpc" / "noted_envs.py")
SHORT = noted_envs.SHORT
MODES = oracle.MODES
pytestmark = pytest.mark.xdist_group("rl_rpc")


@pytest.fixture(scope="module")
def reference():
    return oracle.single_process_reinforce(SEED, EPISODES, observers=3, max_steps=SHORT)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_the_single_process_loop(rl_run, reference, mode):
    oracle.assert_is_the_single_process_loop(rl_run(mode).lines, rl_run(mode).state, reference)
    rewards, _ = reference
    assert len(rewards) == EPISODES and min(rewards) < SHORT


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES[1:])
def test_all_modes_play_and_learn_the_same_with_three_observers(rl_run, mode):
    """The weights are equal to the bit, although the observers' calls arrive in another order in each run."""
    assert rl_run(mode).lines == rl_run("step").lines
    oracle.assert_equal_to_the_bit(rl_run(mode).state, rl_run("step").state)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_rpc_calls_by_mode(rl_run, mode):
    """The number of RPCs that the agent has made and served, without those that torch makes itself."""
    episodes, steps = 3 * EPISODES, rl_run(mode).summary["env_steps"]
    expected = {
        "step": episodes + 2 * steps,
        "packed": episodes + steps,
        "batched": 2 * episodes + steps,
        "rollout": episodes,
    }
    assert calls_in_steps(rl_run(mode).trace, "agent") == expected[mode]


def calls_in_steps(path, name):
    """Return how many RPCs the rank of this name made and served during its steps, from a file of tools/rpctrace.

    A call of the rank to itself counts once, and torch's internal calls are left out.
    """
    events = json.loads(path.read_text())["traceEvents"]
    named = [event for event in events if event["name"] == "process_name"]
    (rank,) = (event["pid"] for event in named if event["args"]["name"] == name)
    bars = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
    steps = [(bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if bar["cat"] == "step"]
    calls = [bar for bar in bars if bar["cat"] == "run" or bar["args"].get("to", name) != name]
    times = [bar["ts"] for bar in calls if not bar["name"].startswith("torch.rpc.")]
    return sum(start <= time < end for time in times for start, end in steps)


@pytest.mark.quick
def test_batched_answers_when_all_playing_observers_have_asked_and_not_before(rl_run):
    """So nobody begins an environment step before all that still play have ended the one before."""
    assert in_lockstep(rl_run("batched")) and not in_lockstep(rl_run("step"))


def in_lockstep(played):
    observers = [[[float(time) for time in line.split()] for line in text.splitlines()] for text in played.notes]
    assert len(observers) == 3 and all(len(episodes) == EPISODES for episodes in observers)
    for episodes in zip(*observers, strict=True):  # for each: end of reset, begin and end of step 1, of step 2, ...
        ends, begins = ([times[first::2] for times in episodes] for first in (0, 1))
        for step in range(max(map(len, begins))):
            before = [times[step] for times in ends if len(times) > step]
            if min(times[step] for times in begins if len(times) > step) < max(before):
                return False
    return True


@pytest.mark.quick
def test_vector_is_a_plain_loop_over_the_same_vector_environments_and_repeats(tmp_path):
    """The games end at different times, by a fall and by the limit. Masked steps count nowhere."""

    def run(name):
        (tmp_path / name).mkdir()
        return play(tmp_path / name, "vector", "--games", 5, observers=2, env_id="noted_envs:Together-v0")

    def make_envs():
        return gym.make_vec("Together-v0", num_envs=5)

    played, again = run("first"), run("second")
    rewards, parameters = oracle.single_process_with_vector_environments(SEED, EPISODES, 2, 5, make_envs)
    oracle.assert_is_the_single_process_loop(played.lines, played.state, (rewards, parameters))
    assert min(rewards) < SHORT and played.summary["env_steps"] < EPISODES * 2 * 5 * SHORT
    assert again.lines == played.lines
    oracle.assert_equal_to_the_bit(again.state, played.state)


def test_vector_with_one_game_is_rollout_and_makes_as_many_calls(tmp_path, rl_run):
    """This environment has no vector class, so the games are stepped one after the other."""
    played = play(tmp_path, "vector", "--games", 1, "--lr", 0.005, traced=True)
    rollout = rl_run("rollout")
    assert played.lines == rollout.lines
    assert played.summary["env_steps"] == rollout.summary["env_steps"]
    oracle.assert_same_policy(played.state, rollout.state["policy"])
    assert calls_in_steps(played.trace, "agent") == 3 * EPISODES


def test_async_learns_from_each_episode_when_it_arrives_with_the_weights_that_it_began_with(tmp_path):
    """Two observers. While one of them is in the middle of an episode, the other plays up to five."""
    order = "112222212111111221"
    saved_at_the_end = ("--log_interval", len(order))
    where = {"env_id": "noted_envs:InTurn-v0", "env": {"ORDER": order}}
    played = play(tmp_path, "async", *saved_at_the_end, observers=2, episodes=len(order), **where)
    rewards, staleness, parameters = oracle.single_process_with_old_weights(SEED, [*map(int, order)], max_steps=SHORT)
    assert played.summary["curves"]["reward/last"] == [[*range(1, len(order) + 1)], rewards]
    assert played.summary["staleness_max"] == max(staleness) == 6
    assert played.summary["staleness_mean"] == pytest.approx(sum(staleness) / len(staleness), abs=1e-3)
    oracle.assert_same_policy(played.state, parameters)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped_in_another_mode_too(tmp_path, rl_run):
    whole, first = rl_run("rollout"), rl_run("packed")
    (tmp_path / "notes").mkdir()
    os.link(first.trace.parent / "notes" / "after_4.pt", tmp_path / "notes" / "end.pt")
    second = play(tmp_path, "rollout", "--resume")
    assert first.lines[:4] + second.lines == whole.lines
    oracle.assert_equal_to_the_bit(second.state, whole.state)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("mode", MODES)
def test_cuda_plays_the_same_episodes_as_the_cpu(tmp_path, reference, mode):
    """The actions are equal, because float64 rounding does not change one. The weights are close to the CPU's."""
    played = play(tmp_path, mode, "--device", "cuda")
    oracle.assert_is_the_single_process_loop(played.lines, played.state, reference)
