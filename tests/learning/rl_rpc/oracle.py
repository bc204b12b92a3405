"""What the tests of rl_rpc compare with: REINFORCE in one process. And how they run main.py.

Also trajectories and learners without RPC, and the Agent of a program in one file, whose observers are in this process.
"""

import json
import random
import re
import statistics
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch

from helpers import ROOT, load_module, package_on_path
from programs import run_script

with package_on_path("rl_rpc"):
    from glue import training

    import actor
    import environment
    import main
    import play
    import policy
    import reinforce

MODES = ("step", "packed", "batched", "rollout")  # those in which nobody plays with old weights
EPISODE_LINE = re.compile(r"^Episode (\d+)\tLast reward: (-?[\d.]+)\tAverage reward: (-?[\d.]+)$", re.M)


EPISODES, SEED = 10, 2
FOLDER = ROOT / "tests" / "learning" / "rl_rpc"
SHORT = load_module(FOLDER / "short_envs.py").SHORT  # episodes end in both ways: the pole falls, or the time is over


def distributed(folder, mode, *flags, observers=3, episodes=EPISODES, traced=False):
    """Run main.py until it has learned from so many short episodes, without an evaluation.

    Return its lines, its checkpoint, its summary, and, if it was traced, the path of the trace and the table of calls.
    """
    summary, trace, checkpoint = (folder / name for name in ("summary.json", "trace.json", "end.pt"))
    tracer = ["tools/rpctrace", trace, "--", sys.executable] if traced else []
    words = ["--mode", mode, "--world_size", observers + 1, "--seed", SEED, "--env_id", "short_envs:Short-v0"]
    words += ["--max_episodes", episodes, "--eval_episodes", 0, "--log_interval", 1]
    # There may be more ranks than free cores, so they must not keep a core busy while they wait.
    words += ["--transport", "uv", "--checkpoint", checkpoint, "--summary_json", summary, *flags]
    done = run_script(*tracer, ROOT / "rl_rpc" / "main.py", *words, env={"PYTHONPATH": FOLDER})
    assert done.returncode == 0 and (traced or not done.stderr), done.stderr
    return SimpleNamespace(
        lines=EPISODE_LINE.findall(done.stdout),
        state=torch.load(checkpoint, weights_only=True, map_location="cpu")["state"],
        summary=json.loads(summary.read_text()),
        trace=trace,
        table=done.stderr,
    )


# ---- one process -----------------------------------------------------------------------------------------------------


def play_games(network, env, seed, ob_id, episode, games=1):
    """Play an observer's episode of each game; return what play_game returns, in a list by game."""
    generator = random.Random(training.seed_for(seed, "actions", ob_id, episode))
    draws = [generator.random() for _ in range(env.spec.max_episode_steps * games)]  # in each step, one for each game
    first_seed = training.seed_for(seed, "environment", ob_id, episode)
    return [play_game(network, env, first_seed + game, draws[game::games]) for game in range(games)]


def play_game(network, env, seed, draws):
    """Return (log-probability of each action, with its graph; reward of each action)."""
    state, _ = env.reset(seed=seed)
    log_probs, rewards = [], []
    for draw in draws:
        h = torch.from_numpy(state).double().unsqueeze(0) @ network.affine1.weight.T + network.affine1.bias
        probs = torch.softmax(torch.relu(h) @ network.affine2.weight.T + network.affine2.bias, dim=1)[0]
        action = 0 if draw < probs[0].item() else 1
        log_probs.append(torch.log(probs[action]))
        state, reward, terminated, truncated, _ = env.step(action)
        rewards.append(reward)
        if terminated or truncated:
            return log_probs, rewards


def returns_of(rewards, gamma):
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


def normalised(returns):
    returns = torch.tensor(returns, dtype=torch.float64)
    return (returns - returns.mean()) / (returns.std() + np.finfo(np.float32).eps.item())


def minus_the_mean_of_each_step(games):
    """Return the returns of these games, minus the mean of those games that play the same step."""
    means = [statistics.mean(game[t] for game in games if t < len(game)) for t in range(max(map(len, games)))]
    return [[g - mean for g, mean in zip(game, means, strict=False)] for game in games]


def single_process_reinforce(seed, episodes, observers=1, gamma=0.99, max_steps=500, games=None):
    """Run REINFORCE without RPC, as in textbooks; return (lowest reward of each episode, parameters).

    It keeps a graph for each step, as the tutorial does, and has its own loop for the returns. With the code under test
    it shares only the seeds of the random numbers, and the initial weights, which follow from the seed. `games`: those
    of an observer in mode `vector`; here they are played one after the other.
    """
    torch.manual_seed(training.seed_for(seed, 0))
    network = policy.Policy(4, 2)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2 if games else 5e-3)
    env = gym.make("CartPole-v1", max_episode_steps=max_steps)
    lowest_rewards = []
    for episode in range(1, episodes + 1):
        log_probs, returns, totals = [], [], []
        for ob_id in range(1, observers + 1):
            played = play_games(network, env, seed, ob_id, episode, games or 1)
            by_game = [returns_of(rewards, gamma) for _, rewards in played]
            if len(by_game) > 1:
                by_game = minus_the_mean_of_each_step(by_game)
            for game, (game_log_probs, rewards) in zip(by_game, played, strict=True):
                log_probs += game_log_probs
                returns += game
                totals.append(sum(rewards))
        loss = sum(-log_prob * g for log_prob, g in zip(log_probs, normalised(returns), strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lowest_rewards.append(min(totals))
    return lowest_rewards, network.state_dict()


def assert_equal_to_the_bit(state, expected):
    for name in ("episodes", "env_steps", "running_reward"):
        assert state[name] == expected[name], name
    torch.testing.assert_close(state["policy"], expected["policy"], rtol=0, atol=0)
    torch.testing.assert_close(state["optimizer"]["state"], expected["optimizer"]["state"], rtol=0, atol=0)


def assert_is_the_single_process_loop(lines, state, reference):
    """Compare the printed lines, whose average begins at 0, and the weights after the last episode."""
    rewards, parameters = reference
    assert [float(last) for _, last, _ in lines] == rewards
    average = 0.0
    for (_, _, printed), reward in zip(lines, rewards, strict=True):
        average = 0.05 * reward + (1 - 0.05) * average
        assert printed == f"{average:.2f}"
    torch.testing.assert_close(state["policy"], parameters, rtol=0, atol=1e-5)


# ---- without RPC -----------------------------------------------------------------------------------------------------


def trajectory_of(steps):
    states = np.random.default_rng(0).normal(size=(steps, 4)).astype(np.float32)
    return reinforce.Trajectory(states, [0, 1] * (steps // 2) + [0] * (steps % 2), [1.0] * steps)


def learn(learner, trajectories):
    return learner.learn(trajectories, reinforce.reinforce_loss(learner.policy, trajectories, learner.gamma))


def make_learner(seed=1, lr=5e-3):
    """Return the learner that run_agent in main.py makes."""
    torch.manual_seed(training.seed_for(seed, 0))
    return reinforce.Learner(policy.Policy(4, 2), lr, gamma=0.99, reward_threshold=475)


def tutorial_agent(path, world_size, *settings, in_turn=False):
    """Return the Agent of a program in one file, whose observers are in this process. `in_turn`: see local_rpc.py."""
    program = load_module(ROOT / path)
    program.rpc = load_module(ROOT / "tests" / "harness" / "local_rpc.py")
    program.rpc.in_turn = in_turn
    program.RRef, program.remote = program.rpc.RRef, program.rpc.remote
    return program.Agent(world_size, *settings)
