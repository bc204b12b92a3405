"""Let a trained policy play: always the most probable action.

    python rl_rpc/main.py --mode rollout --save policy.pt       # trains the policy
    python rl_rpc/play.py policy.pt --episodes 3                # prints the reward of each episode
    python rl_rpc/play.py policy.pt --episodes 1 --show         # in a window: pip install "gymnasium[classic-control]"

Runs in one process, without RPC. It also plays a --checkpoint file of main.py. The evaluation at the end of main.py
is the function play_greedily of this file.
"""

import argparse
import copy
import os
import sys

from glue import UserError, checkpoint, flags, one_line
from glue.training import seed_for

import gymnasium

from actor import Actor
from environment import make_env, sizes
from policy import Policy


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", metavar="FILE.pt", help="written by main.py --save")
    parser.add_argument("--episodes", type=flags.positive_int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--seed", type=flags.non_negative_int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--show", action="store_true", help="show the episodes in a window")
    return parser.parse_args(argv)


def load_policy(path):
    """Return (policy, env_id) from a file that main.py has written.

    It executes no code from the file. It raises UserError for a file that main.py has not written.
    """
    saved = checkpoint.load(path, "rl_rpc")
    env_id = saved["settings"].get("env_id")
    if not isinstance(env_id, str) or ":" in env_id:  # gymnasium would import the module of "module:Name-v0"
        raise UserError(f"{path} names no environment that is safe to make: {env_id!r}")
    try:
        policy = Policy(*sizes(make_env(env_id)))
        policy.load_state_dict(saved["state"]["policy"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"{path} has no policy for {env_id}") from error
    return policy, env_id


def main(argv=None):
    args = parse_args(argv)
    try:
        policy, env_id = load_policy(args.policy)
        env = make_env(env_id, render_mode="human" if args.show else None)
        for episode in range(1, args.episodes + 1):
            reward = play_episode(env, Actor(policy).act_greedily, seed_for(args.seed, "play", episode))
            print(f"Episode {episode}\tReward: {reward:.2f}", flush=True)
    except (UserError, ImportError, gymnasium.error.Error) as error:  # the last: no renderer
        sys.exit(f"{os.path.basename(sys.argv[0])}: {one_line(str(error))}")


def play_episode(env, choose_action, seed=None):
    """Play one episode in `env`, an environment of this process; return its total reward.

    choose_action gets a state, a (D,) float array, and returns an action, an int in [0, A).
    """
    state, _ = env.reset(seed=seed)
    total = 0.0
    done = False
    while not done:
        state, reward, terminated, truncated, _ = env.step(choose_action(state))
        total += float(reward)
        done = terminated or truncated
    return total


def play_greedily(policy, env_id, episodes, seed):
    """Play `episodes` episodes, always with the most probable action; return their rewards."""
    actor = Actor(copy.deepcopy(policy).cpu())  # for one state at a time the CPU is faster than a GPU
    env = make_env(env_id)
    return [play_episode(env, actor.act_greedily, seed_for(seed, "evaluation", n)) for n in range(episodes)]


if __name__ == "__main__":
    main()
