"""Measure rl_rpc: environment steps per second of each mode, and of one process without RPC.

    python bench/rl_rpc.py                         # world sizes 2, 3 and 5: about ten minutes on 2 cores
    python bench/rl_rpc.py --world_sizes 3 --repeats 1 --json bench.json

All variants of a table play the same episodes, from the same seed, and learn from these episodes.  There are two
exceptions: mode async plays other episodes, and the bare environment only takes steps.  The time of training counts,
and the time of start-up does not.  The modes that send RPCs in every environment step play only the first episodes,
because all episodes would take too long.
"""

import argparse
import time

import numpy as np
import torch

from common import interleave, places, run_main, table, use_package, write_json

use_package("rl_rpc")

from actor import Actor
from environment import make_env, sizes
from faster_agents import MODES
from glue import flags, host, seeds
from noise import EpisodeNoise, environment_seed
from policy import Policy
from reinforce import Trajectory, reinforce_loss

SINGLE, BARE = "single process", "bare environment"


def single_process(seed, observers, episodes):
    """Do the job without RPC: play the episodes of all observers in this process, one by one, and learn from them.

    This loop is as fast as we can make it with the same policy and environment, so that the comparison is fair.  It
    chooses actions as the observers do.  It computes one forward pass with gradients for each episode, as the agent
    does.  It uses one intra-op thread, because more threads do not make it faster.
    """
    torch.set_num_threads(1)
    env = make_env("CartPole-v1")
    torch.manual_seed(seeds.seed_for(seed, 0))
    policy = Policy(*sizes(env))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    actor = Actor(policy)
    env_steps = 0
    started = time.perf_counter()
    for episode in range(1, episodes + 1):
        trajectories = [play(env, actor, seed, ob_id, episode) for ob_id in range(1, observers + 1)]
        env_steps += sum(len(trajectory.actions) for trajectory in trajectories)
        learn(policy, optimizer, trajectories)
    return {"env_steps": env_steps, "env_steps_per_second": env_steps / (time.perf_counter() - started)}


def learn(policy, optimizer, trajectories):
    """Train on the episodes of all observers, as the agent does."""
    loss = reinforce_loss(policy, trajectories, gamma=0.99)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def play(env, actor, seed, ob_id, episode):
    """Return the Trajectory of one observer's episode."""
    noise = EpisodeNoise(seed, ob_id, episode, actor.policy)
    trajectory = Trajectory(noise)
    state, _ = env.reset(seed=environment_seed(seed, ob_id, episode))
    first_action = env.action_space.start
    done = False
    while not done:
        uniform, mask = noise.at(len(trajectory.actions))
        trajectory.states.append(state)
        action, _ = actor.act(state, mask, uniform)
        trajectory.actions.append(action)
        state, reward, terminated, truncated, _ = env.step(first_action + action)
        trajectory.rewards.append(float(reward))
        done = terminated or truncated
    return trajectory


def bare_environment(seed, steps=50_000):
    """Take random actions in an environment, without a policy.  On one core no mode can be faster than this."""
    env = make_env("CartPole-v1")
    actions = env.action_space.start + np.random.default_rng(seed).integers(env.action_space.n, size=steps)
    env.reset(seed=seed)
    started = time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return {"env_steps": steps, "env_steps_per_second": steps / (time.perf_counter() - started)}


def main_py(mode, place, world_size, episodes, seed):
    """Run main.py once; return its summary."""
    words = ["--mode", mode, *place, "--world_size", world_size, "--seed", seed]
    words += ["--max_episodes", episodes, "--log_interval", episodes, "--eval_episodes", 0]
    return run_main("rl_rpc", [*words, "--reward_threshold", 1e9])


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="bench/rl_rpc.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--world_sizes", type=flags.positive_int, nargs="+", default=[2, 3, 5], metavar="N", help="a table for each")
    add("--repeats", type=flags.positive_int, default=3, metavar="N", help="runs of each variant, interleaved")
    episodes_help = "episodes of modes rollout and async, and of the single process"
    add("--episodes", type=flags.positive_int, default=250, metavar="N", help=episodes_help)
    add("--step_episodes", type=flags.positive_int, default=25, metavar="N", help="episodes of the other modes")
    add("--seed", type=flags.non_negative_int, default=1, metavar="N")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: measure on the GPU as well as on the CPU")
    add("--json", metavar="FILE", help="write the raw numbers")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    print(
        f"torch {torch.__version__}, {host.usable_cores()} cores, device {args.device}, seed {args.seed}, "
        f"{args.repeats} repeats, {args.step_episodes} episodes ({args.episodes}: rollout, async, {SINGLE})"
    )
    numbers = {}
    for world_size in args.world_sizes:
        observers = world_size - 1
        episodes = {"rollout": args.episodes, "async": args.episodes * observers}  # async counts each observer's
        # The default arguments bind the current values of the loop's variables.  A closure would read the last ones.
        variants = {
            mode + suffix: lambda mode=mode, place=place, size=world_size, episodes=episodes: main_py(
                mode, place, size, episodes.get(mode, args.step_episodes), args.seed
            )
            for mode in MODES
            for suffix, place in places(args.device).items()
        }
        variants[SINGLE] = lambda observers=observers: single_process(args.seed, observers, args.episodes)
        variants[BARE] = lambda: bare_environment(args.seed)
        rows = interleave(variants, args.repeats)
        if len({row["env_steps"] for name in ("rollout", SINGLE) for row in rows[name]}) != 1:
            raise RuntimeError("rollout and the single process did not play the same episodes")
        title = f"environment steps per second, world size {world_size} ({observers} observer{'s' * (observers > 1)})"
        numbers[world_size] = table(rows, "env_steps_per_second", SINGLE, title)
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
