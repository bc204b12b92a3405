"""Making an environment, and refusing one that the policy cannot play.

Runs in the observers, which step the environment, in the agent for the greedy evaluation, and in main.py's checks.

Shapes: D = observation features, A = number of actions.
"""

import copy

import gymnasium as gym

from glue import PermanentError
from glue.tensors import seed_for
from policy import Actor


def make_env(env_id, render_mode=None):
    """Return a gymnasium environment with a flat Box observation (D,) and a Discrete(A) action space.

    Raises PermanentError, in one line, for an environment that does not exist, cannot be built here or does not fit.
    Source: gymnasium.make replaces the tutorial's gym.make.
    """
    try:
        # The passive checker only re-validates every observation; it costs time and prints warnings of its own.
        # A render mode is passed on only if wanted: an environment of your own need not know the argument.
        env = gym.make(env_id, disable_env_checker=True, **({"render_mode": render_mode} if render_mode else {}))
    except (gym.error.Error, ImportError) as error:  # unknown, deprecated, or its simulator is not installed
        raise PermanentError(f"environment {env_id!r} cannot be made: {' '.join(str(error).split())}") from error
    observed, acted = env.observation_space, env.action_space
    if not (isinstance(observed, gym.spaces.Box) and len(observed.shape) == 1):
        env.close()
        raise PermanentError(
            f"environment {env_id!r} observes {observed}; the policy needs a flat Box, one row of numbers"
        )
    if not isinstance(acted, gym.spaces.Discrete):
        env.close()
        raise PermanentError(f"environment {env_id!r} acts in {acted}; the policy needs a Discrete action space")
    return env


def sizes(env):
    """Return (D, A): what the first and the last layer of the policy are made for."""
    return env.observation_space.shape[0], int(env.action_space.n)


def reward_threshold(env, chosen=None):
    """Return the running reward that counts as solved: the one chosen by the user, else the environment's own.

    Without either it is infinite: the job then runs for its --max_episodes.
    """
    if chosen is not None:
        return chosen
    own = env.spec.reward_threshold
    return float("inf") if own is None else own


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
