"""The observer: it owns an environment, plays episodes in it, and asks the agent what to do.

Runs in every process but rank 0, on an RPC thread: the agent creates the Observer there with rpc.remote and then calls
one of its run_episode methods per episode. There is one such method per mode, the tutorial's first; each of the others
is that one plus a single idea. The agent's side of a mode is its method of the same name. (`async` is `rollout` here.)

Shapes: T = steps of an episode, D = observation features.
"""

import numpy as np
import torch.distributed.rpc as rpc

from environment import make_env, sizes
from glue.tensors import seed_for
from policy import Actor, EpisodeNoise, Policy

MAX_STEPS = 10_000  # as in the tutorial; environments with a limit of their own end earlier


def environment_seed(seed, ob_id, episode):
    """Return the seed of one observer's reset of one episode. The tutorial gave all observers the same.

    Seeding every episode, and not only the first, makes an episode a function of (seed, observer, episode, weights):
    what a resumed run plays does not depend on what was played before it.
    """
    return seed_for(seed, ob_id, episode, 0)


def noise_seed(seed, ob_id, episode):
    """Return the seed of the EpisodeNoise of one observer's episode."""
    return seed_for(seed, ob_id, episode, 1)


class Observer:
    """One environment, playing on command.

    Not locked: only the agent calls it, and only when its previous episode has ended, so one call is under way at most.
    """

    def __init__(self, env_id, seed):
        self.id = rpc.get_worker_info().id  # this process's rank: the name under which the agent files our steps
        self.seed = seed
        self.env = make_env(env_id)
        self.first_action = self.env.action_space.start  # the policy counts actions from 0, a few environments do not
        self.policy = Policy(*sizes(self.env))  # acts in `rollout` and `async` only, with the agent's weights
        self.actor = Actor(self.policy)

    def run_episode(self, agent_rref, episode):
        """Mode `step`, the tutorial's: play one episode with two RPCs per step.

        agent_rref refers to the Agent on rank 0; a call on `agent_rref.rpc_sync()` runs there, while this thread waits.
        Source: tutorial part 1, class Observer.
        """
        state = self._reset(episode)
        for _ in range(MAX_STEPS):
            # 1st RPC: the state goes out, the action comes back. A numpy array travels inside the pickled message; a
            # tensor would be sent as a buffer of its own, which for four numbers takes longer than the numbers.
            action = agent_rref.rpc_sync().select_action(self.id, state)
            state, reward, done = self._step(action)
            # 2nd RPC: nothing comes back, but it must have arrived before the next reward is sent. RPCs that are
            # under way together are served by different threads over there, in any order.
            agent_rref.rpc_sync().report_reward(self.id, reward)
            if done:
                break

    def run_episode_packed(self, agent_rref, episode):
        """Mode `packed`: let the last reward travel with the next state, which halves the RPCs.

        Return the episode's last reward, which has no next state to travel with.
        """
        state, reward = self._reset(episode), None
        for _ in range(MAX_STEPS):
            action = agent_rref.rpc_sync().select_action_packed(self.id, reward, state)
            state, reward, done = self._step(action)
            if done:
                break
        return reward

    def run_episode_batched(self, agent_rref, episode):
        """Mode `batched`: play as in `packed`, with an agent that answers all observers from one forward pass.

        From here that is the same call: it only returns later, when the other observers' states are in too. What is
        new is that the agent must be told that we stop, or the others would wait for our next state.
        """
        state, reward = self._reset(episode), None
        for _ in range(MAX_STEPS):
            action = agent_rref.rpc_sync().select_action_batched(self.id, reward, state)
            state, reward, done = self._step(action)
            if done:
                break
        agent_rref.rpc_sync().leave_batch(self.id, reward)

    def run_episode_rollout(self, weights, episode):
        """Modes `rollout`, `async`: play with the weights that come with the call; answer with the trajectory.

        weights: Policy.state_dict(). Return states, a (T, D) float array, and lists of T: actions, rewards, and the
        probabilities that the actions taken had, from which mode `async` sees how far the policy has moved since.
        The random numbers are those that the agent would have drawn for us, so the actions are the same too.
        """
        # Acts on the CPU also when the agent is on a GPU: one state at a time is too little for a GPU to be faster.
        self.policy.load_state_dict(weights)
        noise = EpisodeNoise(noise_seed(self.seed, self.id, episode), self.policy)
        states, actions, rewards, probabilities = [self._reset(episode)], [], [], []
        for t in range(MAX_STEPS):
            uniform, mask_H = noise.at(t)
            action, probability = self.actor.act(states[-1], mask_H, uniform)
            state, reward, done = self._step(action)
            actions.append(action)
            rewards.append(reward)
            probabilities.append(probability)
            if done:
                break
            states.append(state)
        return np.stack(states[: len(actions)]), actions, rewards, probabilities

    def _reset(self, episode):
        state, _ = self.env.reset(seed=environment_seed(self.seed, self.id, episode))
        return state

    def _step(self, action):
        # gymnasium tells a terminal state from a time limit; for REINFORCE both end the episode, as gym's `done` did.
        state, reward, terminated, truncated, _ = self.env.step(self.first_action + action)
        return state, float(reward), terminated or truncated
