"""The agent's and the policy's own logic, without processes, and what differs from the tutorial (README numbers)."""

import threading
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import package_on_path

with package_on_path("rl_rpc"):
    import agent as agent_module
    import environment
    import main as main_module
    import observer
    import policy as policy_module


@pytest.fixture
def make_agent(monkeypatch):
    """Agents without RPC: RRef stands for itself, and there are as many observers as asked for, unborn."""

    def make(observers, **changed):
        monkeypatch.setattr(agent_module, "RRef", lambda value: value)
        monkeypatch.setattr(agent_module.rpc, "get_worker_info", lambda name: SimpleNamespace(id=int(name)))
        monkeypatch.setattr(agent_module, "remote", lambda *args, **kwargs: None)
        flags = {"env_id": "CartPole-v1", "seed": 1, "reward_threshold": None, "mode": "step", "gamma": 0.99, **changed}
        args = SimpleNamespace(wire="direct", **flags)
        agent = agent_module.Agent(args, torch.device("cpu"), [str(rank) for rank in range(1, observers + 1)])
        agent.episode = 1
        for ob_id in agent.ob_rrefs:
            agent.trajectories[ob_id] = agent_module.Trajectory(policy_module.EpisodeNoise(ob_id, agent.policy))
        agent.playing = set(agent.ob_rrefs)
        return agent

    return make


def play_through(agent, ob_id, steps, reward=1.0):
    for t in range(steps):
        agent.select_action(ob_id, np.full(4, 0.01 * t, dtype=np.float32))
        agent.report_reward(ob_id, reward)


def parameters_after(agent, rewards_by_observer):
    for ob_id, rewards in rewards_by_observer.items():
        for t, reward in enumerate(rewards):
            agent.select_action(ob_id, np.full(4, 0.01 * t, dtype=np.float32))
            agent.report_reward(ob_id, reward)
    agent.finish_episode()
    return [p.detach().clone() for p in agent.policy.parameters()]


# ---- differences from the tutorial -----------------------------------------------------------------------------------


def test_every_rank_has_a_name_of_its_own():
    names = [main_module.worker_name(rank, None) for rank in range(32)]
    assert len(set(names)) == 32 and names[:3] == ["agent", "observer1", "observer2"]


def test_observers_see_different_environments_and_draws():
    """Tutorial: every observer seeded its environment with the same --seed."""
    makers = (observer.environment_seed, observer.noise_seed)
    seeds = {make(1, ob_id, episode) for make in makers for ob_id in range(1, 6) for episode in range(1, 6)}
    assert len(seeds) == 50


def test_returns_do_not_leak_from_one_observer_into_another(make_agent, monkeypatch):
    """Tutorial: the running return R went on through the concatenated rewards of all observers."""
    seen = []
    original = agent_module.discounted
    monkeypatch.setattr(agent_module, "discounted", lambda r, g: seen.append(original(r, g)) or seen[-1])
    parameters_after(make_agent(2), {1: [1.0, 1.0], 2: [1.0, 1.0, 1.0]})
    assert seen == [[1.99, 1.0], [pytest.approx(2.9701), 1.99, 1.0]]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30), st.floats(0, 0.999))
@settings(max_examples=50, deadline=None)
def test_discounted_returns_are_the_definition(rewards, gamma):
    expected = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    assert agent_module.discounted(rewards, gamma) == pytest.approx(expected, abs=1e-9)


def test_the_last_reward_is_the_lowest_observers_and_not_divided(make_agent):
    """Tutorial (published code): an episode's steps were shared out between the observers."""
    agent = make_agent(3)
    for ob_id, steps in ((1, 30), (2, 12), (3, 20)):
        play_through(agent, ob_id, steps)
    assert agent.finish_episode() == 12
    assert agent.running_reward == pytest.approx(0.05 * 12)
    assert agent.env_steps == 62


def test_the_threshold_is_within_reach_with_any_number_of_observers(make_agent):
    agent = make_agent(4)
    for _ in range(80):
        for ob_id in agent.trajectories:
            trajectory = agent_module.Trajectory(policy_module.EpisodeNoise(ob_id, agent.policy))
            trajectory.states, trajectory.actions = np.zeros((500, 4)), [0, 1] * 250
            trajectory.rewards = [1.0] * 500
            agent.trajectories[ob_id] = trajectory
        agent.finish_episode()
        agent.episode += 1
    assert agent.solved and agent.reward_threshold == 475


def test_negative_rewards_do_not_count_as_solved_at_once(make_agent):
    """Tutorial: the running reward starts at 0, which is above Acrobot's threshold of -100."""
    agent = make_agent(1, env_id="Acrobot-v1")
    agent.episode = 0
    assert not agent.solved
    agent.episode = 1
    for _ in range(500):
        agent.select_action(1, np.zeros(6, dtype=np.float32))
        agent.report_reward(1, -1.0)
    agent.finish_episode()
    assert agent.running_reward == -500 and not agent.solved


def test_an_episode_of_one_step_leaves_the_policy_finite(make_agent):
    """The standard deviation of one return is NaN, and so would every weight be."""
    for weight in parameters_after(make_agent(1), {1: [1.0]}):
        assert torch.isfinite(weight).all()


def test_importing_main_parses_nothing():
    """Tutorial: argparse and seeding ran at import, again in every spawned child."""
    assert main_module.parse_args(["--world_size", "3"]).seed == 1
    assert main_module.parse_args(["--seed", "7"]).seed == 7


def test_transport_follows_the_mode():
    assert main_module.parse_args(["--mode", "step", "--world_size", "99"]).auto_transport == "shm"
    assert main_module.parse_args(["--mode", "rollout", "--world_size", "9999"]).auto_transport == "uv"


# ---- concurrency -----------------------------------------------------------------------------------------------------


def test_actions_do_not_depend_on_how_calls_interleave(make_agent):
    """Tutorial: all observers drew from one shared generator, and the interpreter's lock was said to make that safe."""
    one_by_one, at_once = make_agent(4), make_agent(4)
    for ob_id in one_by_one.trajectories:
        play_through(one_by_one, ob_id, 300)
    threads = [threading.Thread(target=play_through, args=(at_once, ob_id, 300)) for ob_id in at_once.trajectories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ob_id, trajectory in one_by_one.trajectories.items():
        assert at_once.trajectories[ob_id].actions == trajectory.actions
    assert at_once.rpc_calls == one_by_one.rpc_calls == 4 + 4 * 600


def test_batched_answers_when_all_who_play_are_in_and_not_before(make_agent):
    agent, state = make_agent(3, mode="batched"), np.zeros(4, dtype=np.float32)
    first = agent.select_action_batched(1, None, state)
    second = agent.select_action_batched(2, None, state)
    assert not first.done() and not second.done()
    third = agent.select_action_batched(3, None, state)
    actions = {1: first.wait(), 2: second.wait(), 3: third.wait()}
    assert {ob_id: [a] for ob_id, a in actions.items()} == {i: t.actions for i, t in agent.trajectories.items()}
    # One leaves while the others wait: they are answered at once; then the last one plays on alone.
    waiting = [agent.select_action_batched(ob_id, 1.0, state) for ob_id in (1, 2)]
    agent.leave_batch(3, 1.0)
    assert all(answer.done() for answer in waiting)
    alone = agent.select_action_batched(1, 1.0, state)
    assert not alone.done()
    agent.leave_batch(2, 1.0)
    assert alone.done() and agent.select_action_batched(1, 1.0, state).done()
    agent.leave_batch(1, 1.0)
    assert [len(t.rewards) for t in agent.trajectories.values()] == [4, 2, 1]


# ---- policy and noise ------------------------------------------------------------------------------------------------


def test_one_row_and_many_rows_choose_the_same_actions():
    """What float64 is for: rounding that depends on the number of rows stays below 1e-14."""
    torch.manual_seed(0)
    policy = policy_module.Policy()
    states = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    noise = policy_module.EpisodeNoise(3, policy)
    together = policy(torch.as_tensor(states, dtype=torch.float64), noise.masks(256))
    rows = torch.as_tensor(states, dtype=torch.float64).split(1)
    alone = torch.cat([policy(row, noise.at(t)[1]) for t, row in enumerate(rows)])
    assert (together - alone).abs().max() < 1e-14
    actions = policy.act(states, noise.masks(256), noise.uniforms)
    assert actions == [policy.act(s[None], noise.at(t)[1], [noise.at(t)[0]])[0] for t, s in enumerate(states)]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_noise_does_not_depend_on_how_it_is_asked_for(steps):
    policy = policy_module.Policy(hidden=8)
    stepwise, whole = policy_module.EpisodeNoise(5, policy), policy_module.EpisodeNoise(5, policy)
    masks = whole.masks(400)
    for t in steps:
        uniform, mask = stepwise.at(t - 1)
        assert uniform == whole.uniforms[t - 1] and torch.equal(mask[0], masks[t - 1])


def test_dropout_masks_drop_the_share_that_they_should():
    policy = policy_module.Policy()
    mask = policy_module.EpisodeNoise(1, policy).masks(2000)
    assert set(mask.unique().tolist()) == {0.0, 2.5}
    assert (mask == 0).double().mean().item() == pytest.approx(0.6, abs=0.005)


def test_draw_follows_the_probabilities():
    uniforms = (np.arange(10_000) + 0.5) / 10_000
    counts = np.bincount([policy_module.draw([0.2, 0.5, 0.3], u) for u in uniforms])
    assert counts.tolist() == [2000, 5000, 3000]
    assert policy_module.draw([0.1, 0.2], 0.999999) == 1  # probabilities that sum to less than the draw


# ---- environments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("CartPole-v1", (4, 2)),
        ("Acrobot-v1", (6, 3)),
        ("MountainCar-v0", (2, 3)),
    ],
)
def test_layer_sizes_follow_the_environment(env_id, expected):
    env = environment.make_env(env_id)
    assert environment.sizes(env) == expected
    policy = policy_module.Policy(*expected)
    assert policy(torch.zeros(1, expected[0], dtype=torch.float64)).shape == (1, expected[1])


@pytest.mark.parametrize(
    ("env_id", "word"),
    [
        ("NoSuchPole-v1", "NoSuchPole"),
        ("CartPole-v99", "version"),
        ("Pendulum-v1", "Discrete"),
        ("FrozenLake-v1", "Box"),
        ("no.such.module:Env-v0", "cannot be made"),
    ],
)
def test_environments_that_do_not_fit_are_refused_in_one_line(env_id, word):
    with pytest.raises(ValueError, match=word) as error:
        environment.make_env(env_id)
    assert "\n" not in str(error.value)


class OffsetCorridor(gym.Env):
    """Walk right five times. Its actions are 3 (left) and 4 (right), and it has no step limit."""

    observation_space = gym.spaces.Box(-100, 100, (1,))
    action_space = gym.spaces.Discrete(2, start=3)

    def reset(self, *, seed=None, options=None):
        self.at = 0
        return np.array([0], dtype=np.float32), {}

    def step(self, action):
        assert action in (3, 4)
        self.at += 1 if action == 4 else -1
        return np.array([self.at], dtype=np.float32), 1.0, self.at >= 5, False, {}


def test_actions_that_do_not_start_at_zero_and_episodes_that_never_end():
    gym.register("OffsetCorridor-v0", OffsetCorridor)
    try:
        env = environment.make_env("OffsetCorridor-v0")
        assert environment.reward_threshold(env) == float("inf")
        assert environment.reward_threshold(env, 3.5) == 3.5
        assert environment.play_episode(env, lambda state: 1) == 5
        assert environment.play_episode(env, lambda state: 0, max_steps=50) == 50
    finally:
        gym.registry.pop("OffsetCorridor-v0")


def test_checkpoint_of_another_environment_is_refused(make_agent):
    state = make_agent(1).state_dict()
    with pytest.raises(ValueError, match="CartPole-v1"):
        make_agent(1, env_id="Acrobot-v1").load_state_dict(state)
    again = make_agent(1)
    again.load_state_dict(state)
    assert again.episode == 1
