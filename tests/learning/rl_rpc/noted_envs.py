"""Environments: `--env_id noted_envs:Short-v0`, with this folder on PYTHONPATH.

NOTES, an environment variable, is a folder for what the observers write.
"""

import os
import pathlib
import time

import gymnasium as gym
import torch.distributed.rpc as rpc

SHORT = 20  # an untrained policy keeps the pole up for about 22 steps, so about half of the episodes are cut off


class Noted(gym.Wrapper):
    """CartPole that notes when each of its steps begins and ends, by a clock that all processes of a host share."""

    def reset(self, **how):
        self.begun = getattr(self, "begun", 0) + 1
        if self.begun == 5 and rpc.get_worker_info().id == 1:  # later checkpoints replace the file, but not this link
            os.link(pathlib.Path(os.environ["NOTES"], "end.pt"), pathlib.Path(os.environ["NOTES"], "after_4.pt"))
        state, info = super().reset(**how)
        self.times = [time.monotonic()]
        return state, info

    def step(self, action):
        self.times.append(time.monotonic())
        state, reward, terminated, truncated, info = super().step(action)
        self.times.append(time.monotonic())
        if terminated or truncated:
            with open(pathlib.Path(os.environ["NOTES"], str(rpc.get_worker_info().id)), "a") as file:
                print(*self.times, file=file)
        return state, reward, terminated, truncated, info


class InTurn(gym.Wrapper):
    """CartPole whose episodes end in the order of the environment variable ORDER, such as "1221".

    An episode waits in its first step until the one before it has been learned from, and its observer has begun the
    next. After those of ORDER, episodes wait for the last checkpoint.
    """

    def __init__(self, env):
        super().__init__(env)
        self.order, self.notes = os.environ["ORDER"], pathlib.Path(os.environ["NOTES"])
        self.episode = -1

    def reset(self, **how):
        self.episode += 1
        self.me = str(rpc.get_worker_info().id)
        (self.notes / f"{self.me}-{self.episode}").touch()
        self.waited = False
        return super().reset(**how)

    def step(self, action):
        if not self.waited:
            self.wait_for_my_turn()
            self.waited = True
        return super().step(action)

    def wait_for_my_turn(self):
        places = [place for place, who in enumerate(self.order) if who == self.me]
        if self.episode >= len(places):
            wait_for(self.notes / "end.pt")
        elif place := places[self.episode]:
            before = self.order[place - 1]
            wait_for(self.notes / f"{before}-{self.order[:place].count(before)}")


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.001)


def pole():
    """Return a CartPole of which every episode ends after SHORT steps at the latest."""
    return gym.make("CartPole-v1", max_episode_steps=SHORT, disable_env_checker=True)


gym.register("Short-v0", lambda **how: Noted(pole()))
gym.register("InTurn-v0", lambda **how: InTurn(pole()))
# A limit of SHORT, and a class that steps all games in numpy.
classes = {name: getattr(gym.spec("CartPole-v1"), name) for name in ("entry_point", "vector_entry_point")}
gym.register("Together-v0", max_episode_steps=SHORT, **classes)
