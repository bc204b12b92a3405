"""What old weights do to REINFORCE, and what helps: the table "Learning from old weights" of rl_rpc/RESULTS.md.

    python tests/rl_rpc/stale_learning.py                            # some ten minutes
    python tests/rl_rpc/stale_learning.py --observers 4 --seeds 2

Mode `async` without its processes: one process plays T observers that are equally fast. Each plays with the weights of
when it began, and each end of an episode is an update, in the order in which they end. So a seed repeats.
"""

import argparse
import heapq
import pathlib
import statistics
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "bench"))

import learner as learner_module
import rl_rpc  # the bench of this name: it lets the modules of the package be imported
from environment import make_env
from policy import Actor

# What takes the place of learner.surrogate: (ratio of the probabilities, return) of each step -> what is maximised.
PLAIN = ("REINFORCE", lambda ratio, returns: ratio.log() * returns)
WEIGHTED = ("weights <= 1", lambda ratio, returns: ratio.detach().clamp(max=1.0) * ratio.log() * returns)
CLIPPED = ("PPO's clip", learner_module.surrogate)
VARIANTS = [(0.01, PLAIN), (0.003, PLAIN), (0.01, WEIGHTED), (0.01, CLIPPED), (0.003, CLIPPED)]


def learn(observers, seed, lr, surrogate, max_episodes):
    """Return the Learner after it has solved CartPole, or has not."""
    learner_module.surrogate = surrogate
    learner = learner_module.Learner(seed=seed, lr=lr)
    actor, env = Actor(learner.policy), make_env("CartPole-v1")

    def play_from(now, ob_id):
        trajectory = rl_rpc.play(env, actor, seed, ob_id, learner.episodes + 1)
        return now + len(trajectory.actions), ob_id, trajectory  # a step is the unit of time

    playing = [play_from(0, ob_id) for ob_id in range(1, observers + 1)]
    heapq.heapify(playing)
    for _ in learner.until_solved(max_episodes):
        now, ob_id, trajectory = heapq.heappop(playing)
        learner.learn([trajectory])
        for *_, other in playing:
            other.staleness += 1
        heapq.heappush(playing, play_from(now, ob_id))
    return learner


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observers", type=int, nargs="+", default=[1, 2, 4], metavar="T")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--max_episodes", type=int, default=3000, metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| T | lr | learns by | staleness mean, max | solved | episodes |\n|---|---|---|---|---|---|")
    for observers in args.observers:
        for lr, (name, surrogate) in VARIANTS:
            runs = [learn(observers, seed, lr, surrogate, args.max_episodes) for seed in range(1, args.seeds + 1)]
            stale = [each for run in runs for each in run.staleness]
            episodes = sorted(run.episodes for run in runs if run.solved)
            span = f"{episodes[0]} - {episodes[-1]}" if episodes else "-"
            figures = f"{statistics.mean(stale):.1f}, {max(stale)} | {len(episodes)} of {len(runs)} | {span}"
            print(f"| {observers} | {lr} | {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
