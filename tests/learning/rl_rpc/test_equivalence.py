"""Every mode of rl_rpc plays and learns what a plain loop in one process does."""

import json
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from helpers import load_oracle

oracle = load_oracle("rl_rpc")
MODES, EPISODES, SEED, SHORT = oracle.MODES, oracle.EPISODES, oracle.SEED, oracle.SHORT
distributed = oracle.distributed
pytestmark = pytest.mark.xdist_group("rl_rpc")


@pytest.fixture(scope="module")
def reference():
    return oracle.single_process_reinforce(SEED, EPISODES, observers=3, max_steps=SHORT)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_the_single_process_loop(rl_run, reference, mode):
    """All weights are equal to the bit, although the observers' calls arrive in another order in each run."""
    played, step = rl_run(mode), rl_run("step")
    oracle.assert_is_the_single_process_loop(played.lines, played.state, reference)
    assert played.lines == step.lines and min(float(last) for _, last, _ in step.lines) < SHORT
    oracle.assert_equal_to_the_bit(played.state, step.state)


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


@pytest.mark.parametrize("games", [pytest.param(5, marks=pytest.mark.quick), 1])
def test_vector_is_a_plain_loop_that_plays_one_game_after_the_other(tmp_path, games):
    """The games end at different times, by a fall and by the limit. What is stepped after the end counts nowhere."""
    played = distributed(tmp_path, "vector", "--games", games, observers=2, traced=True)
    rewards, parameters = oracle.single_process_reinforce(SEED, EPISODES, 2, max_steps=SHORT, games=games)
    oracle.assert_is_the_single_process_loop(played.lines, played.state, (rewards, parameters))
    assert min(rewards) < SHORT and played.summary["env_steps"] < EPISODES * 2 * games * SHORT
    assert calls_in_steps(played.trace, "agent") == 2 * EPISODES


@pytest.mark.quick
def test_vector_plays_each_game_to_its_end_in_the_environments_own_vector_class(monkeypatch):
    """There a game that has ended starts again in the next step. Each is played again alone, from its first state."""
    monkeypatch.setattr(oracle.main.step.rpc, "get_worker_info", lambda: SimpleNamespace(id=1))
    observer = oracle.main.MODES["vector"].Observer("CartPole-v1", SEED, games=5)
    assert type(observer.env.unwrapped).__name__ == "CartPoleVectorEnv"
    played = observer.run_episode(observer.policy.state_dict(), episode=3)
    env = gym.make("CartPole-v1")
    for game, playing in enumerate(played.playing.unbind(dim=1)):
        states, actions = played.states[playing, game], played.actions[playing, game]
        env.reset()
        env.unwrapped.state = states[0].numpy()
        alone = [env.step(action) for action in actions.tolist()]
        torch.testing.assert_close(states[1:], torch.from_numpy(np.stack([state for state, *_ in alone[:-1]])))
        assert [fell or cut_off for _, _, fell, cut_off, _ in alone] == [False] * (len(alone) - 1) + [True]
        assert played.rewards[:, game].sum() == len(alone)
    assert not played.playing[-1].all()  # they end at different times


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped_in_another_mode_too(tmp_path, rl_run):
    whole, first = rl_run("rollout"), distributed(tmp_path, "packed", episodes=4)
    second = distributed(tmp_path, "rollout", "--resume")
    assert first.lines + second.lines == whole.lines
    oracle.assert_equal_to_the_bit(second.state, whole.state)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("mode", MODES)
def test_cuda_plays_the_same_episodes_as_the_cpu(tmp_path, reference, mode):
    """The actions are equal, because float64 rounding does not change one. The weights are close to the CPU's."""
    played = distributed(tmp_path, mode, "--device", "cuda")
    oracle.assert_is_the_single_process_loop(played.lines, played.state, reference)


# ---- an agent whose observers are in this process --------------------------------------------------------------------


@pytest.fixture
def agent_of(monkeypatch):
    """Return a function that makes the agent of a mode. `observer`: what stands for the RRef of an observer."""

    def make(mode, observers, observer):
        rpc = SimpleNamespace(RRef=lambda agent: agent, remote=lambda ob_id, *_, **__: observer(ob_id))
        monkeypatch.setattr(oracle.main.step, "rpc", rpc)
        learner = oracle.make_learner(seed=SEED)
        return oracle.main.MODES[mode].Agent(None, observers + 1, learner, "CartPole-v1", SEED)

    return make


class Silent:
    """An observer whose episode is over at once, before it has asked for an action."""

    def __init__(self, ob_id):
        self.ended = torch.futures.Future()
        self.ended.set_result(None)

    def rpc_async(self, timeout):
        return SimpleNamespace(run_episode=lambda *_: self.ended)


@pytest.mark.quick
def test_batched_answers_when_all_playing_observers_have_asked_and_not_before(agent_of):
    agent = agent_of("batched", 3, Silent)
    agent.run_episode()
    state = np.zeros(4, dtype=np.float32)
    early = [agent.select_action(ob_id, state, None) for ob_id in (3, 1)]
    assert not any(future.done() for future in early)
    last = agent.select_action(2, state, None)
    assert all(future.done() for future in (*early, last))
    early = [agent.select_action(ob_id, state, 1.0) for ob_id in (1, 2)]
    assert not any(future.done() for future in early)
    agent.leave(3)
    assert all(future.done() for future in early)


class InOrder:
    """An observer whose answer comes when both observers are asked, and it is next in the order."""

    def __init__(self, ob_id, order, open_calls):
        self.id, self.order, self.open = ob_id, order, open_calls

    def rpc_async(self, timeout):
        return self

    def run_episode(self, weights, episode):
        trajectory, future = oracle.trajectory_of(10 + episode), torch.futures.Future()
        trajectory.weights, trajectory.updates = weights, episode - 1
        self.open[self.id] = (future, trajectory)
        if len(self.open) == 2 and self.order:
            ended, played = self.open.pop(self.order.pop(0))
            ended.set_result(played)
        return future


@pytest.mark.quick
def test_async_learns_from_each_episode_when_it_arrives_with_the_weights_that_it_began_with(agent_of, monkeypatch):
    """While one of two observers is in the middle of an episode, the other plays up to five."""
    order, open_calls = [1, 1, 2, 2, 2, 2, 2, 1, 2, 1, 1, 1, 1, 1, 1, 2, 2, 1], {}
    left = [*order]
    agent = agent_of("async", 2, lambda ob_id: InOrder(ob_id, left, open_calls))
    clipped_loss, staleness = oracle.main.asynchronous.clipped_loss, []

    def note_and_compute(policy, old_policy, trajectory, gamma):
        for name, weight in trajectory.weights.items():
            assert torch.equal(old_policy.state_dict()[name], weight)
        staleness.append(agent.learner.episodes - trajectory.updates)
        return clipped_loss(policy, old_policy, trajectory, gamma)

    monkeypatch.setattr(oracle.main.asynchronous, "clipped_loss", note_and_compute)
    while left:
        agent.run_episode()
        agent.finish_episode()
    ((unused, _),) = open_calls.values()
    unused.set_result(None)
    for place, ob_id in enumerate(order):  # the updates since it has ended its last episode
        began = max((each + 1 for each in range(place) if order[each] == ob_id), default=0)
        assert staleness[place] == place - began
    mean = pytest.approx(sum(staleness) / len(staleness), abs=1e-3)
    assert agent.end() == {"staleness_mean": mean, "staleness_max": max(staleness)} and max(staleness) == 6
