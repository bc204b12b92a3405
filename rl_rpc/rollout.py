"""Mode `rollout`: the agent sends the policy's weights, and the observers play whole episodes without asking.

One RPC for each episode. Read step.py first. Here an episode begins in Agent.run_episode. The observers need no
autograd graph, so they compute the policy in numpy, which is faster (actor.py).

Shapes: T = steps of an episode, D = observation features.
"""

import random

from glue.training import seed_for

import numpy as np

import step
from actor import Actor
from environment import sizes
from policy import Policy, draw
from reinforce import Trajectory


class Agent(step.Agent):  # in the agent, on its main thread
    def run_episode(self):
        """Let all observers play one episode by themselves, each with a copy of the policy."""
        weights = weights_to_send(self.learner.policy)
        for ob_id in self.calls.idle(self.ob_rrefs):  # with --on_lost continue: without those that are lost
            future = self.ob_rrefs[ob_id].rpc_async(timeout=0).run_episode(weights, self.learner.episodes + 1)
            self.calls.add(ob_id, future)
        played = self.calls.results()  # None of an observer that is lost
        self.trajectories = {ob_id: trajectory for ob_id, trajectory in played.items() if trajectory}


class Observer(step.Observer):  # in an observer, on an RPC thread
    def __init__(self, env_id, seed):
        super().__init__(env_id, seed)
        self.policy = Policy(*sizes(self.env))
        self.actor = Actor(self.policy)

    def run_episode(self, weights, episode):
        """Play one episode with these weights, a Policy.state_dict(); return its Trajectory.

        The actions are drawn from the same random numbers as in the other modes, where the agent draws them.
        """
        self.policy.load_state_dict(weights)  # the actor, whose arrays share this memory, has them, too
        generator = random.Random(seed_for(self.seed, "actions", self.id, episode))
        trajectory = Trajectory()
        state = self.reset(episode)
        done = False
        while not done:
            trajectory.states.append(state)
            action = draw(self.actor.probs(state), generator)
            state, reward, done = self.step(action)
            trajectory.actions.append(action)
            trajectory.rewards.append(reward)
        trajectory.states = np.stack(trajectory.states)  # (T, D): one array is pickled faster than many
        return trajectory


def weights_to_send(policy):
    """Return the weights on the CPU: RPC's CUDA support is beta. They must not change before all have answered."""
    return {name: weight.cpu() for name, weight in policy.state_dict().items()}
