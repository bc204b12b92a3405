"""The observer of mode `step`, the tutorial's: it owns an environment and asks the agent for each action.

Runs in every process except rank 0, on an RPC thread. The agent makes the Observer in that process with rpc.remote, and
then calls run_episode for each episode. The observers of the other modes are in faster_observers.py.

Shapes: D = observation features.
"""

import torch.distributed.rpc as rpc

from environment import make_env
from noise import environment_seed

MAX_STEPS = 10_000  # of an episode, as in the tutorial; an environment may have a lower limit of its own


class Observer:
    """An environment, which plays an episode when the agent calls run_episode. Source: tutorial part 1, class Observer.

    It needs no lock. Only the agent calls it, and only when the previous episode has ended, so one call at a time runs.
    """

    def __init__(self, env_id, seed):
        self.id = rpc.get_worker_info().id  # the rank of this process, by which the agent tells the observers apart
        self.seed = seed
        self.env = make_env(env_id)
        self.first_action = self.env.action_space.start  # 0 in most environments; the policy always counts from 0

    def run_episode(self, agent_rref, episode):
        """Play one episode, with two RPCs for each environment step.

        agent_rref refers to the Agent in rank 0. A method called on `agent_rref.rpc_sync()` runs in rank 0, while this
        thread waits for its result.
        """
        state = self.reset(episode)
        for _ in range(MAX_STEPS):
            # First RPC: it sends the state, and its result is the action. The state is a numpy array, which is pickled
            # with the message. A tensor would be sent as a separate buffer, which for four numbers takes longer.
            action = agent_rref.rpc_sync().select_action(self.id, state)
            state, reward, done = self.step(action)
            # Second RPC: it has no result, but this thread waits until the agent has stored the reward. Otherwise two
            # reports could be served by two threads of the agent at the same time, and be stored in the wrong order.
            agent_rref.rpc_sync().report_reward(self.id, reward)
            if done:
                break

    def reset(self, episode):
        """Start an episode; return its first state (D,)."""
        state, _ = self.env.reset(seed=environment_seed(self.seed, self.id, episode))
        return state

    def step(self, action):
        """Take one environment step; return (state, reward, whether the episode is over)."""
        # gymnasium has two flags: a terminal state, and a time limit. Both end the episode, as gym's `done` did.
        state, reward, terminated, truncated, _ = self.env.step(self.first_action + action)
        return state, float(reward), terminated or truncated
