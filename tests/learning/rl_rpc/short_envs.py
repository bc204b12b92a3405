"""An environment for --env_id short_envs:Short-v0, with this folder on PYTHONPATH."""

import gymnasium as gym

SHORT = 20  # an untrained policy keeps the pole up for about 22 steps, so about half of the episodes are cut off

gym.register("Short-v0", gym.spec("CartPole-v1").entry_point, max_episode_steps=SHORT)
