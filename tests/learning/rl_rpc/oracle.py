"""What the tests of rl_rpc compare with: REINFORCE in one process. Also trajectories and learners without RPC, and the
Agent of a program in one file, whose observers are in this process.
"""

import random
import re
import statistics

import gymnasium as gym
import numpy as np
import torch

from helpers import ROOT, load_module, package_on_path

with package_on_path("rl_rpc"):
    from glue import scenario, training

    import actor
    import environment
    import main
    import play
    import policy
    import reinforce

MODES = ("step", "packed", "batched", "rollout")  # those in which nobody plays with old weights
EPISODE_LINE = re.compile(r"^Episode (\d+)\tLast reward: (-?[\d.]+)\tAverage reward: (-?[\d.]+)$", re.M)


# ---- one process -----------------------------------------------------------------------------------------------------


def play_episode(network, env, seed, ob_id, episode):
    """Play an observer's episode; return (log-probability of each action, with its graph; states; actions; rewards)."""
    generator = random.Random(training.seed_for(seed, "actions", ob_id, episode))
    state, _ = env.reset(seed=training.seed_for(seed, "environment", ob_id, episode))
    log_probs, states, actions, rewards = [], [], [], []
    done = False
    while not done:
        h = torch.from_numpy(state).double().unsqueeze(0) @ network.affine1.weight.T + network.affine1.bias
        probs = torch.softmax(torch.relu(h) @ network.affine2.weight.T + network.affine2.bias, dim=1)[0]
        action = 0 if generator.random() < probs[0].item() else 1
        log_probs.append(torch.log(probs[action]))
        states.append(state)
        actions.append(action)
        state, reward, terminated, truncated, _ = env.step(action)
        rewards.append(reward)
        done = terminated or truncated
    return log_probs, states, actions, rewards


def returns_of(rewards, gamma):
    return [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]


def normalised(returns):
    returns = torch.tensor(returns, dtype=torch.float64)
    return (returns - returns.mean()) / (returns.std() + np.finfo(np.float32).eps.item())


def new_network(seed, lr=5e-3):
    torch.manual_seed(training.seed_for(seed, 0))
    network = policy.Policy(4, 2)
    return network, torch.optim.Adam(network.parameters(), lr=lr)


def single_process_reinforce(seed, episodes, observers=1, gamma=0.99, max_steps=500):
    """Run REINFORCE without RPC, as in textbooks; return (lowest reward of each episode, parameters).

    It keeps a graph for each step, as the tutorial does, and has its own loop for the returns. With the code under test
    it shares only the seeds of the random numbers, and the initial weights, which follow from the seed.
    """
    network, optimizer = new_network(seed)
    env = gym.make("CartPole-v1", max_episode_steps=max_steps)
    lowest_rewards = []
    for episode in range(1, episodes + 1):
        log_probs, returns, totals = [], [], []
        for ob_id in range(1, observers + 1):
            played, _, _, rewards = play_episode(network, env, seed, ob_id, episode)
            log_probs += played
            returns += returns_of(rewards, gamma)
            totals.append(sum(rewards))
        loss = sum(-log_prob * g for log_prob, g in zip(log_probs, normalised(returns), strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lowest_rewards.append(min(totals))
    return lowest_rewards, network.state_dict()


def single_process_with_old_weights(seed, order, gamma=0.99, max_steps=500):
    """Learn as mode `async` from episodes that end in this order of observers; return (rewards, staleness, parameters).

    Each episode is played with the weights of its beginning. The loss is PPO's, by the definition in the paper.
    """
    network, optimizer = new_network(seed)
    env = gym.make("CartPole-v1", max_episode_steps=max_steps)

    def begin(ob_id, updates):
        return updates, play_episode(network, env, seed, ob_id, updates + 1)

    playing = {ob_id: begin(ob_id, 0) for ob_id in set(order)}
    totals, staleness = [], []
    for updates, ob_id in enumerate(order):
        began, (old_log_probs, states, actions, rewards) = playing[ob_id]
        scores = network.scores(np.stack(states))
        log_probs = torch.log_softmax(scores, dim=1)[range(len(actions)), actions]
        ratio = (log_probs - torch.stack(old_log_probs).detach()).exp()
        advantages = normalised(returns_of(rewards, gamma))
        clipped = ratio.clamp(0.8, 1.2)
        optimizer.zero_grad()
        (-torch.minimum(ratio * advantages, clipped * advantages).sum()).backward()
        optimizer.step()
        totals.append(sum(rewards))
        staleness.append(updates - began)
        playing[ob_id] = begin(ob_id, updates + 1)
    return totals, staleness, network.state_dict()


def minus_the_mean_of_each_step(games):
    """Return the returns of all games, one after the other, minus the mean of the games that play the same step."""
    means = [statistics.mean(game[t] for game in games if t < len(game)) for t in range(max(map(len, games)))]
    return [g - mean for game in games for g, mean in zip(game, means, strict=False)]


def single_process_with_vector_environments(seed, updates, observers, games, make_envs, gamma=0.99):
    """Run REINFORCE without RPC in vector environments; return what single_process_reinforce returns.

    The games of an observer are taken apart at once: each is a list of its steps until it ends.
    """
    network, optimizer = new_network(seed, lr=1e-2)
    envs = make_envs()
    lowest_rewards = []
    for update in range(1, updates + 1):
        log_probs, returns, totals = [], [], []
        for ob_id in range(1, observers + 1):
            generator = random.Random(training.seed_for(seed, "actions", ob_id, update))
            states, _ = envs.reset(seed=training.seed_for(seed, "environment", ob_id, update))
            played, rewards, ended = [[] for _ in range(games)], [[] for _ in range(games)], set()
            while len(ended) < games:
                probs = torch.softmax(network.scores(states), dim=1)
                actions = [0 if generator.random() < each[0].item() else 1 for each in probs]
                states, rewards_now, terminated, truncated, _ = envs.step(np.array(actions))
                for game in {*range(games)} - ended:
                    played[game].append(torch.log(probs[game, actions[game]]))
                    rewards[game].append(float(rewards_now[game]))
                    if terminated[game] or truncated[game]:
                        ended.add(game)
            log_probs += [log_prob for game in played for log_prob in game]
            returns += minus_the_mean_of_each_step([returns_of(game, gamma) for game in rewards])
            totals += map(sum, rewards)
        optimizer.zero_grad()
        sum(-log_prob * g for log_prob, g in zip(log_probs, normalised(returns), strict=True)).backward()
        optimizer.step()
        lowest_rewards.append(min(totals))
    return lowest_rewards, network.state_dict()


def assert_equal_to_the_bit(state, expected):
    assert state["episodes"] == expected["episodes"] and state["env_steps"] == expected["env_steps"]
    assert state["running_reward"] == expected["running_reward"]
    for name, weight in expected["policy"].items():
        assert torch.equal(state["policy"][name], weight), name
    for index, moments in expected["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(state["optimizer"]["state"][index][name], value)


def assert_is_the_single_process_loop(lines, state, reference):
    """Compare the printed lines, whose average begins at 0, and the weights after the last episode."""
    rewards, parameters = reference
    assert [float(last) for _, last, _ in lines] == rewards
    average = 0.0
    for (_, _, printed), reward in zip(lines, rewards, strict=True):
        average = 0.05 * reward + (1 - 0.05) * average
        assert printed == f"{average:.2f}"
    assert_same_policy(state, parameters)


def assert_same_policy(state, parameters):
    for name, expected in parameters.items():
        torch.testing.assert_close(state["policy"][name], expected, rtol=0, atol=1e-5)


# ---- without RPC -----------------------------------------------------------------------------------------------------


def trajectory_of(steps, reward=1.0, features=4):
    states = np.random.default_rng(0).normal(size=(steps, features)).astype(np.float32)
    return reinforce.Trajectory(states, [0, 1] * (steps // 2) + [0] * (steps % 2), [reward] * steps)


def learn(learner, trajectories):
    return learner.learn(trajectories, reinforce.reinforce_loss(learner.policy, trajectories, learner.gamma))


def make_learner(env_id="CartPole-v1", seed=1, lr=5e-3, gamma=0.99):
    """Return the learner that run_agent in main.py makes."""
    env = environment.make_env(env_id)
    torch.manual_seed(training.seed_for(seed, 0))
    net = policy.Policy(*environment.sizes(env))
    return reinforce.Learner(net, lr, gamma, environment.reward_threshold(env))


def tutorial_agent(path, world_size, *settings, in_turn=False):
    """Return the Agent of a program in one file, whose observers are in this process. `in_turn`: see local_rpc.py."""
    program = load_module(ROOT / path)
    program.rpc = load_module(ROOT / "tests" / "harness" / "local_rpc.py")
    program.rpc.in_turn = in_turn
    program.RRef, program.remote = program.rpc.RRef, program.rpc.remote
    return program.Agent(world_size, *settings)
