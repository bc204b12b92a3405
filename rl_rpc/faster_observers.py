"""The observers of the faster modes. Each adds one idea to observer.py; its agent is in faster_agents.py.

Runs in every process except rank 0, on an RPC thread. The agent makes and calls these observers as it does Observer.
Modes `rollout` and `async` have the same observer.

Shapes: T = environment steps of an episode, D = observation features, H = hidden units.
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
    """Mode `packed`: each reward is sent together with the next state, so there is one RPC for each step, not two."""

    def run_episode(self, agent_rref, episode):
        """Play one episode; return its last reward, which no state follows."""
        agent = agent_rref.owner()  # a call of a function by name takes half the messages of a call through the RRef
        state = self.reset(episode)
        last_reward = None
        for _ in range(MAX_STEPS):
            # One RPC: the reward of the last step and the state after it go to the agent, and the action comes back.
            action = rpc_sync(agent, agent_by_name.select_action_packed, args=(self.id, last_reward, state))
            # One environment step, in this process.
            state, last_reward, done = self.step(action)
            if done:
                break
        return last_reward


class BatchedObserver(Observer):
    """Mode `batched`: as `packed`, but the agent answers all observers together, from one forward pass.

    The loop is that of `packed`. The RPC takes longer, because the agent answers it only when all observers that still
    play have asked. After its last step an observer calls leave_batch; otherwise the agent and the other observers
    would wait for its next state.
    """

    def run_episode(self, agent_rref, episode):
        """Play one episode, then leave the batch."""
        agent = agent_rref.owner()
        state = self.reset(episode)
        last_reward = None
        for _ in range(MAX_STEPS):
            # One RPC, which also waits for the states of the other observers.
            action = rpc_sync(agent, agent_by_name.select_action_batched, args=(self.id, last_reward, state))
            # One environment step, in this process.
            state, last_reward, done = self.step(action)
            if done:
                break
        # One more RPC after the episode. It brings the last reward; the agent then waits for no state of this observer.
        rpc_sync(agent, agent_by_name.leave_batch, args=(self.id, last_reward))


class RolloutObserver(Observer):
    """Modes `rollout` and `async`: plays whole episodes by itself, with a copy of the policy.

    The copy is always on the CPU. For one state at a time a GPU would not be faster.
    """

    def __init__(self, env_id, seed):
        super().__init__(env_id, seed)
        self.policy = Policy(*sizes(self.env))
        self.actor = Actor(self.policy)

    def run_episode(self, weights, episode):
        """Play one episode with the weights that come with the call; return its states, actions and rewards.

        weights: a Policy.state_dict(). Returns the states, a (T, D) float array, and three lists of T numbers: actions,
        rewards, and the probability with which each action was drawn. Mode `async` compares these probabilities with
        those of the current policy.
        The random numbers are those that the agent uses in the other modes, so the actions are the same as well.
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
