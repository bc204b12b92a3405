"""PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions", CartPole.

The agent (rank 0) answers all observers (the other ranks) from one forward pass, as soon as the last
of them has asked. "Batch row 2" is point 2 of "The batch page" in DIFFERENCES.md. agent.py develops
the idea further: its mode `batched` sends the reward along, and observers may end their episodes.

    python tutorial_batch.py --plot times.png    # 1 to 4 observers, with and without batching
    python tutorial_batch.py --world_size 3      # 2 observers only
    python tutorial_batch.py --world_size 3 --rank 0 [--no_batch]  # ranks 1, 2: other terminals

Shapes: N = observers, T = steps of each of them, 4 features of a state, 2 actions.
"""

import argparse
import os
import threading
import time
import warnings

import gymnasium as gym
import numpy as np
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

NUM_STEPS = 500
AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"
warnings.filterwarnings("ignore", "You are using a Backend")  # torch warns of its own rpc.shutdown


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = torch.nn.Linear(4, 128)
        self.affine2 = torch.nn.Linear(128, 2)

    def forward(self, x, generator):
        """Return the probabilities (N, 2) of the actions in the states x (N, 4)."""
        x = self.affine1(x)
        # nn.Dropout does the same, but cannot be told which generator to draw from (row 9).
        kept = torch.rand(x.shape, generator=generator) >= 0.6
        return torch.softmax(self.affine2(torch.relu(x * kept / 0.4)), dim=1)


class Observer:
    def __init__(self, seed, batch):
        self.id = rpc.get_worker_info().id  # the rank of this process
        self.env = gym.make("CartPole-v1")
        self.env.reset(seed=1000 * seed + self.id)  # a seed for each observer (row 7)
        self.batch = batch

    def run_episode(self, agent_rref, gamma):
        """Take NUM_STEPS steps, and start again where an episode ends before: so each batch has a
        state of every observer. Only the agent calls this, one call at a time: nothing to lock.
        Return what the steps have earned until their episode's end (T,), and the first's length."""
        state, _ = self.env.reset()  # a numpy array (4,)
        returns, rewards, lengths = [], [], []
        for step in range(NUM_STEPS):
            agent = agent_rref.rpc_sync()
            select_action = agent.select_action_batch if self.batch else agent.select_action
            action = select_action(self.id, state)
            state, reward, terminated, truncated, _ = self.env.step(action)
            rewards.append(reward)
            if terminated or truncated or step + 1 == NUM_STEPS:
                R, ep_returns = 0, []
                for r in rewards[::-1]:
                    R = r + gamma * R
                    ep_returns.insert(0, R)
                returns.extend(ep_returns)
                lengths.append(len(rewards))
                rewards = []
                state, _ = self.env.reset()
        return returns, lengths[0]


class Agent:
    def __init__(self, world_size, batch, seed):
        self.ob_ids = range(1, world_size)
        names = [OBSERVER_NAME.format(ob_id) for ob_id in self.ob_ids]
        self.ob_rrefs = [rpc.remote(name, Observer, args=(seed, batch)) for name in names]
        self.agent_rref = rpc.RRef(self)
        self.batch = batch
        self.generators = [torch.Generator().manual_seed(1000 * seed + i) for i in range(world_size)]
        torch.manual_seed(1000 * seed)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.running_reward = 0
        self.lock = threading.Lock()  # guards the next two, which all observers' calls share
        self.states = {}
        self.future_actions = torch.futures.Future()

    def select_action(self, ob_id, state):
        """Without batching: return the action (int) for a state (4,). All observers call this at
        once, without a lock: each has its own list and generator (row 10)."""
        probs = self.policy(torch.from_numpy(state).unsqueeze(0), self.generators[ob_id])  # (1, 2)
        action = torch.multinomial(probs, 1, generator=self.generators[ob_id]).item()
        self.saved_log_probs[ob_id].append(probs[0, action].log())
        return action

    @rpc.functions.async_execution
    def select_action_batch(self, ob_id, state):
        """With batching: return a Future of the action (int) for a state (4,). All observers call
        this at once. The Future frees this RPC thread; the answer is sent when it is completed."""
        with self.lock:
            future_action = self.future_actions.then(lambda actions: actions.wait()[ob_id])
            self.states[ob_id] = state
            states, future_actions = self.states, self.future_actions
            if len(states) == len(self.ob_ids):
                self.states = {}
                self.future_actions = torch.futures.Future()
        # Unlocked: one call alone has found its table complete, and all observers wait for it.
        if len(states) == len(self.ob_ids):
            ...
        return future_action
