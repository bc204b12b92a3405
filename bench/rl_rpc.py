"""Measure rl_rpc: environment steps per second of each mode, and of one process without RPC.

    python bench/rl_rpc.py                                   # world sizes 2, 3 and 5: about ten minutes on 2 cores
    python bench/rl_rpc.py --world_sizes 3 --repeats 1
    python bench/rl_rpc.py --world_sizes 3 --repeats 5 --modes rollout vector --games 8 32 128

All variants of a table play the same episodes, from the same seed, and learn from these episodes, except that the modes
async and vector play other episodes. The time of training counts, and the time of start-up does not. The modes that
send RPCs in every environment step play only the first episodes, because all episodes would take too long.
"""

import functools
import itertools
import random
import time

import torch

from common import argument_parser, compare, places, run_main, use_package, write_json

use_package("rl_rpc")

from glue.seeds import seed_for

from actor import Actor
from environment import make_env, reward_threshold, sizes
from policy import Policy, draw
from reinforce import Learner, Trajectory, reinforce_loss

MODES = ("step", "packed", "batched", "rollout", "async", "vector")
SINGLE = "single process"
EPISODES, STEP_EPISODES = 250, 25  # of rollout, async, vector and the single process; and of the other modes


def single_process(seed, observers, episodes):
    """Do the job without RPC: play the episodes of all observers in this process, one by one, and learn from them.

    This loop is as fast as we can make it with the same policy and environment, so that the comparison is fair. It
    chooses actions as the observers do. It computes one forward pass with gradients for each episode, as the agent
    does. It uses one intra-op thread, because more threads do not make it faster.
    """
    torch.set_num_threads(1)
    env = make_env("CartPole-v1")
    torch.manual_seed(seed_for(seed, 0))
    learner = Learner(Policy(*sizes(env)), lr=5e-3, gamma=0.99, reward_threshold=reward_threshold(env))
    actor = Actor(learner.policy)
    started = time.perf_counter()
    for episode in range(1, episodes + 1):
        trajectories = [play(env, actor, seed, ob_id, episode) for ob_id in range(1, observers + 1)]
        learner.learn(trajectories, reinforce_loss(learner.policy, trajectories, learner.gamma))
    return {"env_steps": learner.env_steps, "env_steps_per_second": learner.env_steps / (time.perf_counter() - started)}


def play(env, actor, seed, ob_id, episode):
    """Return the Trajectory of one observer's episode."""
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


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--world_sizes", type=int, nargs="+", default=[2, 3, 5], metavar="N", help="a table for each")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=MODES, metavar="MODE", help="only these modes")
    parser.add_argument("--games", type=int, nargs="+", default=[8, 32], metavar="N", help="vector: a row for each")
    args = parser.parse_args()
    tables = {}
    for world_size in args.world_sizes:
        observers = world_size - 1
        episodes = {mode: EPISODES for mode in ("rollout", "vector")}
        episodes["async"] = EPISODES * observers  # it counts each observer's
        variants = {}
        for mode, (suffix, place) in itertools.product(args.modes, places(args.device).items()):
            count = episodes.get(mode, STEP_EPISODES)
            words = ["--mode", mode, *place, "--world_size", world_size, "--seed", args.seed, "--eval_episodes", 0]
            words += ["--max_episodes", count, "--log_interval", count, "--reward_threshold", 1e9]
            for games in args.games if mode == "vector" else [None]:
                name, more = (f"{mode} {games} games", ["--games", games]) if games else (mode, [])
                variants[name + suffix] = functools.partial(run_main, "rl_rpc", *words, *more)
        variants[SINGLE] = functools.partial(single_process, args.seed, observers, EPISODES)
        title = f"environment steps per second, world size {world_size}, torch {torch.__version__}"
        rows = tables[world_size] = compare(variants, args, "env_steps_per_second", SINGLE, title)
        if len({run["env_steps"] for name in ("rollout", SINGLE) for run in rows.get(name, [])}) != 1:
            raise RuntimeError("rollout and the single process did not play the same episodes")
    write_json(args.json, tables)


if __name__ == "__main__":
    main()
