"""The four modes, and a plain single-process REINFORCE loop, learn the same thing from the same seed."""

import itertools
import re

import gymnasium as gym
import numpy as np
import pytest
import torch

from helpers import package_on_path, run_main

with package_on_path("rl_rpc"):
    import observer
    import policy
    from glue import seeds

MODES = ("step", "packed", "batched", "rollout")
EPISODE_LINE = re.compile(r"^Episode (\d+)\tLast reward: (-?[\d.]+)\tAverage reward: (-?[\d.]+)$", re.M)


def single_process_reinforce(seed, episodes, gamma=0.99):
    """REINFORCE with one environment and no RPC, written out as in textbooks; returns (episode rewards, parameters).

    It keeps a graph per step and its own returns loop, as the tutorial does; it shares only the random numbers (and the
    initial weights that follow from the seed) with the code under test.
    """
    torch.manual_seed(seeds.seed_for(seed, 0))
    network = policy.Policy()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    env = gym.make("CartPole-v1")
    episode_rewards = []
    for episode in range(1, episodes + 1):
        noise = policy.EpisodeNoise(observer.noise_seed(seed, 1, episode), network)
        state, _ = env.reset(seed=observer.environment_seed(seed, 1, episode))
        log_probs, rewards = [], []
        for t in itertools.count():
            uniform, mask = noise.at(t)
            h = torch.from_numpy(state).double().unsqueeze(0) @ network.affine1.weight.T + network.affine1.bias
            h = torch.relu(h * mask)
            probs = torch.softmax(h @ network.affine2.weight.T + network.affine2.bias, dim=1)[0]
            action = 0 if uniform < probs[0].item() else 1
            log_probs.append(torch.log(probs[action]))
            state, reward, terminated, truncated, _ = env.step(action)
            rewards.append(reward)
            if terminated or truncated:
                break
        returns = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
        returns = torch.tensor(returns, dtype=torch.float64)
        returns = (returns - returns.mean()) / (returns.std() + np.finfo(np.float32).eps.item())
        loss = sum(-log_prob * g for log_prob, g in zip(log_probs, returns, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        episode_rewards.append(sum(rewards))
    return episode_rewards, network.state_dict()


def play(tmp_path, mode, world_size, *flags, episodes=15, name=None):
    """Run main.py; returns (its lines, its checkpoint)."""
    path = tmp_path / f"{name or mode}.pt"
    if world_size > 2:  # more ranks than cores, and whatever else runs on a machine that tests: wait without spinning
        flags += ("--transport", "uv")
    done = run_main(
        "rl_rpc",
        "--mode",
        mode,
        "--world_size",
        world_size,
        "--max_episodes",
        episodes,
        "--log_interval",
        1,
        "--eval_episodes",
        0,
        "--checkpoint",
        path,
        *flags,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return EPISODE_LINE.findall(done.stdout), torch.load(path, weights_only=True)["state"]


def assert_equal_to_the_bit(state, expected):
    assert state["episode"] == expected["episode"] and state["env_steps"] == expected["env_steps"]
    assert state["running_reward"] == expected["running_reward"]
    for name, weight in expected["policy"].items():
        assert torch.equal(state["policy"][name], weight), name


@pytest.fixture(scope="module")
def reference():
    return single_process_reinforce(seed=1, episodes=15)


@pytest.mark.parametrize("mode", MODES)
def test_with_one_observer_every_mode_is_the_single_process_loop(tmp_path, reference, mode):
    rewards, parameters = reference
    lines, state = play(tmp_path, mode, 2)
    assert [float(last) for _, last, _ in lines] == rewards
    for name, expected in parameters.items():
        torch.testing.assert_close(state["policy"][name], expected, rtol=0, atol=1e-5)


def test_all_modes_play_and_learn_the_same_with_three_observers(tmp_path):
    """Equal weights to the bit after 15 episodes: one differing action anywhere would have changed them."""
    runs = {mode: play(tmp_path, mode, 4) for mode in MODES}
    lines, expected = runs["step"]
    assert len(lines) == 15 and expected["env_steps"] > 15 * 3 * 8
    for mode in MODES[1:]:
        assert runs[mode][0] == lines, mode
        assert_equal_to_the_bit(runs[mode][1], expected)


@pytest.mark.parametrize("mode", [pytest.param("step", marks=pytest.mark.slow), "batched"])
def test_a_repeated_run_repeats_exactly(tmp_path, mode):
    """Three observers on two cores interleave differently each time."""
    lines, expected = play(tmp_path, mode, 4, name="first")
    again, state = play(tmp_path, mode, 4, name="second")
    assert again == lines
    assert_equal_to_the_bit(state, expected)


@pytest.mark.slow
def test_another_seed_plays_something_else(tmp_path):
    assert play(tmp_path, "rollout", 3, "--seed", 1)[0] != play(tmp_path, "rollout", 3, "--seed", 2)[0]


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped_in_another_mode_too(tmp_path):
    lines, expected = play(tmp_path, "rollout", 3, episodes=12, name="whole")
    first, _ = play(tmp_path, "step", 3, episodes=5, name="halves")
    second, state = play(tmp_path, "rollout", 3, "--resume", episodes=12, name="halves")
    assert first + second == lines
    assert_equal_to_the_bit(state, expected)
    for index, moments in expected["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(state["optimizer"]["state"][index][name], value)
