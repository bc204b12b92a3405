"""The observers of the faster modes. Each is observer.py's plus one idea; its agent is in faster_agents.py.

Runs in every process but rank 0, on an RPC thread, called by the agent as Observer is. (`async` has rollout's.)

Shapes: T = steps of an episode, D = observation features.
"""

import numpy as np
from torch.distributed.rpc import rpc_sync

import agent_by_name
from actor import Actor
from environment import sizes
from noise import EpisodeNoise
from observer import MAX_STEPS, Observer
from policy import Policy


class PackedObserver(Observer):
    """Mode `packed`: the last reward travels with the next state, which halves the RPCs."""

    def run_episode(self, agent_rref, episode):
        """Play one episode; return its last reward, which has no next state to travel with."""
        agent = agent_rref.owner()  # calls by name take half the messages of calls through the RRef
        state = self.reset(episode)
        reward = None
        for _ in range(MAX_STEPS):
            action = rpc_sync(agent, agent_by_name.select_action_packed, args=(self.id, reward, state))
            state, reward, done = self.step(action)
            if done:
                break
        return reward


class BatchedObserver(Observer):
    """Mode `batched`: plays as in `packed`, with an agent that answers all observers from one forward pass.

    From here that is the same call: it only returns later, when the other observers' states are in too. What is new is
    that the agent must be told that we stop, or the others would wait for our next state.
    """

    def run_episode(self, agent_rref, episode):
        """Play one episode."""
        agent = agent_rref.owner()
        state = self.reset(episode)
        reward = None
        for _ in range(MAX_STEPS):
            action = rpc_sync(agent, agent_by_name.select_action_batched, args=(self.id, reward, state))
            state, reward, done = self.step(action)
            if done:
                break
        rpc_sync(agent, agent_by_name.leave_batch, args=(self.id, reward))


class RolloutObserver(Observer):
    """Modes `rollout`, `async`: plays whole episodes with a copy of the policy, on the CPU.

    One state at a time is too little for a GPU to be faster, also where the agent's policy is on one.
    """

    def __init__(self, env_id, seed):
        super().__init__(env_id, seed)
        self.policy = Policy(*sizes(self.env))
        self.actor = Actor(self.policy)

    def run_episode(self, weights, episode):
        """Play one episode with the weights that come with the call; return what happened in it.

        weights: Policy.state_dict(). Return states, a (T, D) float array, and lists of T: actions, rewards, and the
        probabilities that the actions taken had, from which mode `async` sees how far the policy has moved since.
        The random numbers are those that the agent would have drawn for us, so the actions are the same too.
        """
        self.policy.load_state_dict(weights)
        noise = EpisodeNoise(self.seed, self.id, episode, self.policy)
        states = []
        actions = []
        rewards = []
        probabilities = []
        state = self.reset(episode)
        for t in range(MAX_STEPS):
            uniform, mask_H = noise.at(t)
            states.append(state)
            action, probability = self.actor.act(state, mask_H, uniform)
            state, reward, done = self.step(action)
            actions.append(action)
            rewards.append(reward)
            probabilities.append(probability)
            if done:
                break
        return np.stack(states), actions, rewards, probabilities
