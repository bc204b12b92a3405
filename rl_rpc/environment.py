"""Making an environment, and refusing one that the policy cannot play.

Runs in the observers, which step the environment, in the agent, which needs its sizes, and in main.py's checks.

Shapes: D = observation features, A = number of actions.
"""

import gymnasium as gym

from glue import PermanentError


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
