"""The observer of the tutorial's mode, `step`: it owns an environment and asks the agent for each action.

Runs in every process but rank 0, on an RPC thread: the agent creates the Observer there with rpc.remote and then calls
run_episode for each episode. The observers of the other modes: faster_observers.py.

Shapes: D = observation features.
"""

import torch.distributed.rpc as rpc

from environment import make_env
from noise import environment_seed

MAX_STEPS = 10_000  # as in the tutorial; environments with a limit of their own end earlier


class Observer:
    """One environment, playing on command. Source: tutorial part 1, class Observer.

    Not locked: only the agent calls it, and only when its previous episode has ended, so one call is under way at most.
    """

    def __init__(self, env_id, seed):
        self.id = rpc.get_worker_info().id  # this process's rank: the agent keeps what we do by this number
        self.seed = seed
        self.env = make_env(env_id)
        self.first_action = self.env.action_space.start  # the policy counts actions from 0, a few environments do not

    def run_episode(self, agent_rref, episode):
        """Play one episode with two RPCs per step.

        agent_rref refers to the Agent on rank 0; a call on `agent_rref.rpc_sync()` runs there, while this thread waits.
        """
        state = self.reset(episode)
        for _ in range(MAX_STEPS):
            # 1st RPC: the state goes out, the action comes back. A numpy array travels inside the pickled message; a
            # tensor would be sent as a buffer of its own, which for four numbers takes longer than the numbers.
            action = agent_rref.rpc_sync().select_action(self.id, state)
            state, reward, done = self.step(action)
            # 2nd RPC: nothing comes back, but it must have arrived before the next reward is sent. RPCs that are
            # under way together are served by different threads of the agent's process, in any order.
            agent_rref.rpc_sync().report_reward(self.id, reward)
            if done:
                break

    def reset(self, episode):
        """Begin an episode; return its first state (D,)."""
        state, _ = self.env.reset(seed=environment_seed(self.seed, self.id, episode))
        return state

    def step(self, action):
        """Step the environment; return (state, reward, whether the episode is over)."""
        # gymnasium tells a terminal state from a time limit; for REINFORCE both end the episode, as gym's `done` did.
        state, reward, terminated, truncated, _ = self.env.step(self.first_action + action)
        return state, float(reward), terminated or truncated
