"""The same training as in tutorial.py, in one process: `diff single.py tutorial.py` shows what RPC
adds. The observers play one after the other. With one observer, the default, both print the same
for some dozens of episodes. Then rounding tells them apart, because RPC threads build the graph.

    python single.py
    python single.py --world_size 3             # an agent and two observers

PyTorch's tutorial "Getting started with Distributed RPC Framework", part 1, without RPC.
"Difference 7" is number 7 in docs/differences/rl_rpc.md.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.distributions import Categorical


class Policy(nn.Module):
    """From pytorch/examples, reinforcement_learning."""

    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x):  # (1, 4)
        x = self.affine1(x)
        x = self.dropout(x)
        x = F.relu(x)
        action_scores = self.affine2(x)
        return F.softmax(action_scores, dim=1)  # (1, 2): the probabilities of the two actions


class Observer:
    def __init__(self, ob_id, seed):
        self.id = ob_id
        self.env = gym.make("CartPole-v1")
        self.env.reset(seed=seed + self.id)  # a different seed for each (difference 7)

    def run_episode(self, agent):
        state, _ = self.env.reset()
        for _ in range(10000):
            # ask the agent what to do in this state
            action = agent.select_action(self.id, state)

            # do it
            state, reward, terminated, truncated, _ = self.env.step(action)

            # tell it what this has earned
            agent.report_reward(self.id, reward)

            # the pole has fallen, or has stood for 500 steps
            if terminated or truncated:
                break


class Agent:
    def __init__(self, world_size, gamma, seed):
        self.observers = []
        self.rewards = {}
        self.saved_log_probs = {}
        torch.manual_seed(seed)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=1e-2)
        self.gamma = gamma
        self.eps = np.finfo(np.float32).eps.item()
        self.running_reward = 0
        self.reward_threshold = gym.make("CartPole-v1").spec.reward_threshold
        for ob_rank in range(1, world_size):
            self.observers.append(Observer(ob_rank, seed))
            self.rewards[ob_rank] = []
            self.saved_log_probs[ob_rank] = []

    def select_action(self, ob_id, state):
        state = torch.from_numpy(state).float().unsqueeze(0)
        probs = self.policy(state)
        m = Categorical(probs)
        action = m.sample()
        self.saved_log_probs[ob_id].append(m.log_prob(action))
        return action.item()

    def report_reward(self, ob_id, reward):
        self.rewards[ob_id].append(reward)

    def run_episode(self):
        for observer in self.observers:
            observer.run_episode(self)

    def finish_episode(self):
        # one list for the steps of all observers
        probs, returns = [], []
        for ob_id in self.rewards:
            R, ob_returns = 0, []  # 0 again for each observer (difference 8)
            for r in self.rewards[ob_id][::-1]:
                R = r + self.gamma * R
                ob_returns.insert(0, R)
            probs.extend(self.saved_log_probs[ob_id])
            returns.extend(ob_returns)

        # The total reward of the weakest observer, and the running reward. They are printed as
        # "Last reward" and "Average reward".
        min_reward = min([sum(self.rewards[ob_id]) for ob_id in self.rewards])
        self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward

        # the next episode begins with empty lists
        for ob_id in self.rewards:
            self.rewards[ob_id] = []
            self.saved_log_probs[ob_id] = []

        policy_loss = []
        returns = torch.tensor(returns)
        if len(returns) > 1:  # the deviation of a single number is NaN
            returns = (returns - returns.mean()) / (returns.std() + self.eps)
        for log_prob, R in zip(probs, returns, strict=True):
            policy_loss.append(-log_prob * R)
        self.optimizer.zero_grad()
        policy_loss = torch.cat(policy_loss).sum()
        policy_loss.backward()
        self.optimizer.step()
        return min_reward


def run_agent(args):
    agent = Agent(args.world_size, args.gamma, args.seed)
    threshold = agent.reward_threshold
    print(f"This will run until reward threshold of {threshold} is reached. Ctrl+C to exit.")
    for i_episode in range(1, args.max_episodes + 1):
        agent.run_episode()
        last_reward = agent.finish_episode()

        if i_episode % args.log_interval == 0:
            last, average = f"{last_reward:.2f}", f"{agent.running_reward:.2f}"
            print(f"Episode {i_episode}\tLast reward: {last}\tAverage reward: {average}")
        if agent.running_reward > threshold:
            print(f"Solved! Running reward is now {agent.running_reward}!")
            break
    else:
        print(f"Not solved after {args.max_episodes} episodes.")


def parse_args():
    parser = argparse.ArgumentParser(description="Reinforcement learning")
    add = parser.add_argument
    add("--world_size", "--world-size", type=int, default=2, help="ranks: agent, observers (2)")
    add("--max_episodes", type=int, default=2000, help="at most (2000)")
    add("--log_interval", "--log-interval", type=int, default=10, help="episodes per line (10)")
    add("--gamma", type=float, default=0.99, help="discount factor (0.99)")
    add("--seed", type=int, default=1, help="of all random numbers (1)")
    args = parser.parse_args()
    if args.world_size < 2:
        parser.error("--world_size must be 2 or more: the agent and at least one observer")
    if args.max_episodes < 1 or args.log_interval < 1 or args.seed < 0:
        parser.error("--max_episodes and --log_interval are 1 or more, --seed is 0 or more")
    return args


if __name__ == "__main__":
    args = parse_args()
    torch.set_num_threads(1)  # such small operations are slower with more threads
    run_agent(args)
