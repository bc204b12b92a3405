"""For exercises.py: an agent dismisses one of its two observers, and goes on with the other one.

python tests/learning/rl_rpc/dismiss_job.py --world_size 3

It prints what each observer's process has before and after: the observers, and the environments that were closed. Then
it prints the environment steps of an episode of the other observer, and how many of them the agent has learned from.
"""

import gc
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "rl_rpc"))
from glue import launch

import gymnasium as gym
import torch.distributed.rpc as rpc

import main
import step
from policy import Policy
from reinforce import Learner

closed = []  # in each process, the environments that were closed


class Noted(gym.Wrapper):
    def close(self):
        closed.append(self)
        super().close()


gym.register("Noted-v0", lambda **how: Noted(gym.make("CartPole-v1", **how)))


def observers_and_closed():
    """Return the numbers of Observers and of closed environments in this process."""
    return sum(type(thing).__name__ == "Observer" for thing in gc.get_objects()), len(closed)


def in_the_observers():
    return [rpc.rpc_sync(rank, observers_and_closed) for rank in (1, 2)]


def run_worker(rank, args, job):
    rpc.init_rpc(job.workers[rank], rank=rank, world_size=3, rpc_backend_options=job.rpc_options())
    if rank == 0:
        run_agent(args)
    job.wait_for_all()
    rpc.shutdown()


def run_agent(args):
    agent = step.Agent(
        step.Observer, 3, Learner(Policy(4, 2), step.Agent.default_lr, args.gamma, 475.0), "Noted-v0", args.seed
    )
    agent.run_episode()
    agent.finish_episode()
    print(json.dumps(in_the_observers()), flush=True)
    agent.dismiss(1)
    deadline = time.monotonic() + 10
    while in_the_observers()[0][0] and time.monotonic() < deadline:  # its process gets a message, and nobody waits
        time.sleep(0.05)
    print(json.dumps(in_the_observers()), flush=True)
    before = agent.learner.env_steps
    agent.run_episode()
    agent.finish_episode()
    print(len(agent.trajectories[2].rewards), agent.learner.env_steps - before, flush=True)


if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args(), main.scenario)
