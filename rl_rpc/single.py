"""What tutorial.py does with one observer (--world_size 2), in one process and without RPC."""

import argparse

import gymnasium as gym
import torch


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = torch.nn.Linear(4, 128)
        self.affine2 = torch.nn.Linear(128, 2)

    def forward(self, x, generator):
        x = self.affine1(x)
        kept = torch.rand(x.shape, generator=generator) >= 0.6
        return torch.softmax(self.affine2(torch.relu(x * kept / 0.4)), dim=1)


class Observer:
    def __init__(self, seed):
        self.env = gym.make("CartPole-v1")
        self.env.reset(seed=1000 * seed + 1)

    def run_episode(self, agent):
        state, _ = self.env.reset()
        for _ in range(10000):
            action = agent.select_action(state)
            state, reward, terminated, truncated, _ = self.env.step(action)
            agent.rewards.append(reward)
            if terminated or truncated:
                break


class Agent:
    def __init__(self, seed):
        self.rewards, self.saved_log_probs = [], []
        self.generator = torch.Generator().manual_seed(1000 * seed + 1)
        torch.manual_seed(1000 * seed)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.running_reward = 0

    def select_action(self, state):
        probs = self.policy(torch.from_numpy(state).unsqueeze(0), self.generator)
        action = torch.multinomial(probs, 1, generator=self.generator).item()
        self.saved_log_probs.append(probs[0, action].log())
        return action

    def finish_episode(self):
        self.running_reward = 0.05 * sum(self.rewards) + (1 - 0.05) * self.running_reward
        R, returns = 0, []
        for r in self.rewards[::-1]:
            R = r + 0.99 * R
            returns.insert(0, R)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-7)
        policy_loss = (-torch.stack(self.saved_log_probs) * returns).sum()
        self.optimizer.zero_grad()
        policy_loss.backward()
        self.optimizer.step()
        self.rewards, self.saved_log_probs = [], []


parser = argparse.ArgumentParser()
parser.add_argument("--max_episodes", type=int, default=2000)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
agent = Agent(args.seed)
observer = Observer(args.seed)
for i_episode in range(1, args.max_episodes + 1):
    observer.run_episode(agent)
    last = sum(agent.rewards)
    agent.finish_episode()
    mean = agent.running_reward
    if i_episode % 10 == 0 or mean > 475:
        print(f"Episode {i_episode}\tLast reward: {last:.2f}\tAverage reward: {mean:.2f}")
    if mean > 475:
        break
