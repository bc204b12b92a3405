"""Watch a trained policy play, with dropout off and always the most probable action.

    python main.py --mode rollout --save policy.pt
    python play.py policy.pt --episodes 3               # prints each episode's reward
    python play.py policy.pt --episodes 1 --gif out.gif # and draws it (needs: pip install "gymnasium[classic-control]")

Runs alone, without RPC. A --checkpoint file of main.py can be played as well. main.py's evaluation at the end is
play_greedily of this file.
"""

import argparse
import copy
import os
import sys

import gymnasium

from actor import Actor
from environment import make_env, sizes
from glue import checkpoint, flags
from glue.tensors import seed_for
from policy import Policy


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="rl_rpc/play.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", metavar="FILE.pt", help="written by main.py --save")
    parser.add_argument("--episodes", type=flags.positive_int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--seed", type=flags.non_negative_int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--gif", metavar="FILE.gif", help="write the episodes as an animation")
    return parser.parse_args(argv)


def load_policy(path):
    """Return (policy, env_id) from a file of main.py's.  Executes nothing in it; raises PermanentError for another."""
    settings, state = checkpoint.load(path, "rl_rpc")
    policy = Policy(*sizes(make_env(settings["env_id"])))
    policy.load_state_dict(state["policy"])
    return policy, settings["env_id"]


def main(argv=None):
    args = parse_args(argv)
    if args.gif:
        # The frames go to a file and to no screen: without this the renderer complains on a machine that has none.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    frames = []
    try:
        policy, env_id = load_policy(args.policy)
        env = make_env(env_id, render_mode="rgb_array" if args.gif else None)
        for episode in range(1, args.episodes + 1):
            seed = seed_for(args.seed, "play", episode)
            draw = (lambda: frames.append(env.render())) if args.gif else None
            reward = play_episode(env, Actor(policy).act_greedily, seed, on_step=draw)
            print(f"Episode {episode}\tReward: {reward:.2f}", flush=True)
        if args.gif:
            write_gif(args.gif, frames, fps=env.metadata.get("render_fps", 30))
    except (ValueError, ImportError, OSError, gymnasium.error.Error) as error:  # the last: no renderer installed
        sys.exit(f"rl_rpc/play.py: {' '.join(str(error).split())}")


def play_episode(env, choose_action, seed=None, max_steps=10_000, on_step=None):
    """Play one episode on a local environment; return its total reward.

    choose_action: state (D,) float array -> action, an int in [0, A). on_step is called after the reset and every step.
    """
    state, _ = env.reset(seed=seed)
    total = 0.0
    for _ in range(max_steps):
        if on_step is not None:
            on_step()
        # Discrete spaces may start at another number than 0; the policy always counts from 0.
        state, reward, terminated, truncated, _ = env.step(env.action_space.start + choose_action(state))
        total += float(reward)
        if terminated or truncated:
            break
    return total


def play_greedily(policy, env_id, episodes, seed):
    """Return the rewards of `episodes` episodes in which the most probable action is always taken, dropout off."""
    actor = Actor(copy.deepcopy(policy).cpu())  # one state at a time: a GPU would only add its launch times
    env = make_env(env_id)
    return [play_episode(env, actor.act_greedily, seed_for(seed, "evaluation", n)) for n in range(episodes)]


def write_gif(path, frames, fps):
    """Write an animation. frames: list of (height, width, 3) uint8 arrays, as env.render() gives them."""
    from PIL import Image  # only here: playing without --gif needs neither Pillow nor a renderer

    pictures = [Image.fromarray(frame) for frame in frames]
    checkpoint.write_aside(
        path,
        lambda aside: pictures[0].save(
            aside, format="GIF", save_all=True, append_images=pictures[1:], duration=1000 / fps, loop=0
        ),
    )
    print(f"{len(frames)} frames written to {path}")


if __name__ == "__main__":
    main()
