"""Measures how REINFORCE and three variants learn from old weights: "Learning from old weights" in rl_rpc/RESULTS.md.

    python tests/rl_rpc/stale_learning.py                            # about ten minutes
    python tests/rl_rpc/stale_learning.py --observers 4 --seeds 2

It simulates mode `async` in one process, with T observers that are equally fast. An observer plays an episode with the
weights that were current when the episode began. Each end of an episode is one update, in the order of these ends. So
a run with the same seed repeats exactly.
"""

import argparse
import heapq
import pathlib
import statistics
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "rl_rpc"))

from actor import Actor
from environment import make_env, reward_threshold, sizes
from faster_agents import PlayedTrajectory, clipped_loss
from glue.seeds import seed_for
from noise import EpisodeNoise, environment_seed
from policy import DTYPE, Policy
from reinforce import log_probabilities, normalised_returns, reinforce_loss

GAMMA = 0.99


def weighted_loss(policy, trajectories, gamma):
    """Return REINFORCE's loss, with each step weighted by (probability now / probability when drawn), at most by 1."""
    log_probs_T = log_probabilities(policy, trajectories)
    returns_T = normalised_returns(trajectories, gamma)
    played = [probability for trajectory in trajectories for probability in trajectory.probabilities]
    ratio_T = (log_probs_T.detach() - torch.tensor(played, dtype=DTYPE).log()).exp()
    return -(ratio_T.clamp(max=1.0) * log_probs_T * returns_T).sum()


PLAIN = ("REINFORCE", reinforce_loss)
WEIGHTED = ("weights <= 1", weighted_loss)
CLIPPED = ("PPO's clip", clipped_loss)
VARIANTS = [(0.01, PLAIN), (0.003, PLAIN), (0.01, WEIGHTED), (0.01, CLIPPED), (0.003, CLIPPED)]


def play(env, actor, seed, ob_id, episode):
    """Play one observer's episode with the current weights; return its trajectory."""
    noise = EpisodeNoise(seed, ob_id, episode, actor.policy)
    states = []
    actions = []
    rewards = []
    probabilities = []
    state, _ = env.reset(seed=environment_seed(seed, ob_id, episode))
    done = False
    while not done:
        uniform, mask_H = noise.at(len(actions))
        states.append(state)
        action, probability = actor.act(state, mask_H, uniform)
        state, reward, terminated, truncated, _ = env.step(action)
        actions.append(action)
        rewards.append(float(reward))
        probabilities.append(probability)
        done = terminated or truncated
    trajectory = PlayedTrajectory(noise)
    trajectory.fill(states, actions, rewards, probabilities)
    return trajectory


def learn(observers, seed, lr, loss_function, max_episodes):
    """Train with `observers` simulated observers.

    Return (whether CartPole was solved, the number of episodes, the staleness of each update).
    """
    env = make_env("CartPole-v1")
    torch.manual_seed(seed_for(seed, 0))
    policy = Policy(*sizes(env))
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    actor = Actor(policy)
    staleness = []
    running_reward = 0.0

    def play_from(now, ob_id):
        episode = len(staleness) + 1
        trajectory = play(env, actor, seed, ob_id, episode)
        return now + len(trajectory.actions), ob_id, episode, trajectory  # the unit of time is one environment step

    playing = [play_from(0, ob_id) for ob_id in range(1, observers + 1)]
    heapq.heapify(playing)
    while running_reward <= reward_threshold(env) and len(staleness) < max_episodes:
        now, ob_id, episode, trajectory = heapq.heappop(playing)
        loss = loss_function(policy, [trajectory], GAMMA)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        staleness.append(len(staleness) + 1 - episode)
        running_reward = 0.05 * sum(trajectory.rewards) + (1 - 0.05) * running_reward
        heapq.heappush(playing, play_from(now, ob_id))
    return running_reward > reward_threshold(env), len(staleness), staleness


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observers", type=int, nargs="+", default=[1, 2, 4], metavar="T")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--max_episodes", type=int, default=3000, metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| T | lr | learns by | staleness mean, max | solved | episodes |\n|---|---|---|---|---|---|")
    for observers in args.observers:
        for lr, (name, loss_function) in VARIANTS:
            seeds = range(1, args.seeds + 1)
            runs = [learn(observers, seed, lr, loss_function, args.max_episodes) for seed in seeds]
            stale = [each for _, _, staleness in runs for each in staleness]
            episodes = sorted(episodes for solved, episodes, _ in runs if solved)
            span = f"{episodes[0]} - {episodes[-1]}" if episodes else "-"
            figures = f"{statistics.mean(stale):.1f}, {max(stale)} | {len(episodes)} of {len(runs)} | {span}"
            print(f"| {observers} | {lr} | {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
