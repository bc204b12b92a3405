"""Measures how REINFORCE and three variants learn from old weights, for docs/results/rl_rpc.md.

    python tests/learning/rl_rpc/stale_learning.py                            # about ten minutes
    python tests/learning/rl_rpc/stale_learning.py --observers 4 --seeds 2

It simulates mode `async` in one process, with T observers that are equally fast. An observer plays an episode with the
weights that were current when the episode began. Each end of an episode is one update, in the order of these ends. So
a run with the same seed repeats exactly.
"""

import argparse
import copy
import heapq
import pathlib
import random
import statistics
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "rl_rpc"))

from actor import Actor
from asynchronous import clipped_loss
from environment import make_env, reward_threshold, sizes
from glue.seeds import seed_for
from policy import Policy, draw
from reinforce import Learner, Trajectory, log_probabilities, normalised_returns, reinforce_loss

GAMMA = 0.99


def plain_loss(policy, old_policy, trajectory, gamma):
    """Return REINFORCE's loss, which does not look at the policy with which the episode was played."""
    return reinforce_loss(policy, [trajectory], gamma)


def weighted_loss(policy, old_policy, trajectory, gamma):
    """Return REINFORCE's loss, with each step weighted by (probability now / probability when drawn), at most by 1."""
    log_probs_T = log_probabilities(policy, [trajectory])
    returns_T = normalised_returns([trajectory], gamma)
    ratio_T = (log_probs_T - log_probabilities(old_policy, [trajectory])).exp().detach()
    return -(ratio_T.clamp(max=1.0) * log_probs_T * returns_T).sum()


PLAIN = ("REINFORCE", plain_loss)
WEIGHTED = ("weights <= 1", weighted_loss)
CLIPPED = ("PPO's clip", clipped_loss)
VARIANTS = [(lr, way) for lr in (0.01, 0.005, 0.003) for way in (PLAIN, WEIGHTED, CLIPPED)]


def play(env, policy, seed, ob_id, episode):
    """Play one observer's episode with the current weights; return its trajectory."""
    actor = Actor(policy)
    generator = random.Random(seed_for(seed, "actions", ob_id, episode))
    trajectory = Trajectory()
    state, _ = env.reset(seed=seed_for(seed, "environment", ob_id, episode))
    done = False
    while not done:
        trajectory.states.append(state)
        action = draw(actor.probs(state), generator)
        state, reward, terminated, truncated, _ = env.step(action)
        trajectory.actions.append(action)
        trajectory.rewards.append(float(reward))
        done = terminated or truncated
    return trajectory


def learn(observers, seed, lr, loss_function, max_episodes):
    """Train with `observers` simulated observers.

    Return (whether CartPole was solved, the number of episodes, the staleness of each update).
    """
    env = make_env("CartPole-v1")
    torch.manual_seed(seed_for(seed, 0))
    learner = Learner(Policy(*sizes(env)), lr, GAMMA, reward_threshold(env))
    staleness = []

    def play_from(now, ob_id):
        old_policy = copy.deepcopy(learner.policy)
        trajectory = play(env, old_policy, seed, ob_id, learner.episodes + 1)
        ended = now + len(trajectory.actions)  # the unit of time is one environment step
        return ended, ob_id, learner.episodes, old_policy, trajectory

    playing = [play_from(0, ob_id) for ob_id in range(1, observers + 1)]
    heapq.heapify(playing)
    while not learner.solved and learner.episodes < max_episodes:
        now, ob_id, updates, old_policy, trajectory = heapq.heappop(playing)
        staleness.append(learner.episodes - updates)
        learner.learn([trajectory], loss_function(learner.policy, old_policy, trajectory, GAMMA))
        heapq.heappush(playing, play_from(now, ob_id))
    return learner.solved, learner.episodes, staleness


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
