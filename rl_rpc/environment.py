"""Makes one environment, or several that step together, and refuses one that does not fit the policy.

Shapes: D = observation features, A = number of actions.
"""

import functools

from glue import UserError

import gymnasium as gym

MAX_STEPS = 10_000  # of an episode, as in the tutorial, where the environment has no limit of its own


def make_env(env_id, render_mode=None, games=None):
    """Return a gymnasium environment with a flat Box observation (D,) and the actions 0 to A - 1.

    With `games` it is a vector environment, which plays that many games. An episode ends by the environment's limit, or
    after MAX_STEPS. Raises UserError, with one line of text, if the environment cannot be made, or does not fit.
    """
    try:
        # The environment checker only validates each observation again; it takes time and prints warnings.
        # A render mode is passed on only if there is one, because some environments do not have this argument.
        options = {"render_mode": render_mode} if render_mode else {}
        env = gym.make(env_id, disable_env_checker=True, **options)
    except (gym.error.Error, ImportError) as error:  # unknown, deprecated, or a missing simulator
        raise UserError(f"environment {env_id!r} cannot be made: {' '.join(str(error).split())}") from error
    observed = env.observation_space
    acted = env.action_space
    is_flat = isinstance(observed, gym.spaces.Box) and len(observed.shape) == 1
    if not is_flat or not isinstance(acted, gym.spaces.Discrete):
        env.close()
        has = f"environment {env_id!r} has the observation space {observed} and the action space {acted}"
        raise UserError(f"{has}; the policy needs a flat Box (one row) and a Discrete one")
    spec = env.spec  # after the next line it would have the limit of TimeLimit
    if spec.max_episode_steps is None:
        env = gym.wrappers.TimeLimit(env, MAX_STEPS)
    if acted.start != 0:  # the policy always counts from 0
        env = gym.wrappers.TransformAction(env, lambda action: acted.start + action, gym.spaces.Discrete(acted.n))
    return env if games is None else vector_of(env, spec, env_id, games)


def vector_of(env, spec, env_id, games):
    """Return a vector environment that plays what `env` plays: the environment's own if one fits, otherwise `sync`.

    Some environments have a vector class, which steps all games in numpy. `sync` steps one game after the other.
    """
    env.close()  # it has shown that the policy can play it
    if spec.vector_entry_point is None or env.unwrapped.action_space.start != 0:  # a vector class takes its own numbers
        return gym.vector.SyncVectorEnv([functools.partial(make_env, env_id)] * games)
    if spec.max_episode_steps is None:  # no wrapper could end the games of such a class
        raise UserError(f"environment {env_id!r} has a vector class, but no time limit that would end its games")
    return gym.make_vec(env_id, num_envs=games)


def sizes(env):
    """Return (D, A), the number of observation features and of actions."""
    return env.observation_space.shape[0], int(env.action_space.n)


def reward_threshold(env, chosen=None):
    """Return the running reward above which the environment counts as solved: `chosen`, or the environment's own.

    If there is neither, it is infinite, and the job runs for --max_episodes episodes.
    """
    if chosen is not None:
        return chosen
    own = env.spec.reward_threshold
    return float("inf") if own is None else own
