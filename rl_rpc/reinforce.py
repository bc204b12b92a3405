"""Learning: what an episode was, and REINFORCE, which makes the policy better by it. There is no RPC in this file.

Runs in the agent (rank 0), on its main thread, and in bench.py's single process.

REINFORCE in two lines: play an episode with actions drawn from the policy; then make each action taken more probable
in proportion to its return, the discounted sum of the rewards that followed it (less than average: less probable).

Shapes: T = steps of all episodes together, D = observation features, H = hidden units, A = actions.
"""

import statistics

import numpy as np
import torch
import torch.nn.functional as F
from torch import optim

from environment import make_env, reward_threshold, sizes
from glue.report import check_finite
from glue.seeds import seed_for
from policy import DTYPE, Policy


class Trajectory:
    """What one observer saw, did and earned in one episode, with the random numbers that it was played with."""

    def __init__(self, noise):
        self.noise, self.staleness = noise, 0  # the latter: updates since the weights that it is played with
        self.states, self.actions, self.rewards, self.probabilities = [], [], [], []

    def next_draw(self):
        """Return (uniform, mask_H) for the step that comes next."""
        return self.noise.at(len(self.actions))

    def fill(self, played):
        """Take over a whole episode that was played elsewhere: states, actions, rewards, the actions' probabilities."""
        self.states, self.actions, self.rewards, self.probabilities = played
        self.noise.masks(len(self.actions))  # drawn now, while other observers still play


def discounted(rewards, gamma):
    """Return the return of every step of one episode: its reward plus gamma times the next step's return."""
    returns, g = [], 0.0
    for reward in reversed(rewards):
        g = reward + gamma * g
        returns.append(g)
    return returns[::-1]


def surrogate(ratio_T, returns_T):
    """Return what to maximise instead, for steps that were played with older weights (mode `async`).

    The ratio says how much more probable the action has become since. It has the gradient of REINFORCE where it is 1;
    beyond 0.8 and 1.2 there is nothing to gain any more, so that no old episode pulls the policy far.
    Source: Schulman et al. 2017, Proximal Policy Optimization Algorithms, equation 7.
    """
    return torch.minimum(ratio_T * returns_T, ratio_T.clamp(0.8, 1.2) * returns_T)


class Learner:
    """The policy, its optimizer, and how far they have come: what a checkpoint holds."""

    def __init__(self, env_id="CartPole-v1", seed=1, gamma=0.99, lr=1e-2, threshold=None, device="cpu"):
        """`threshold`: the running reward that is solved; None: the environment's own."""
        env = make_env(env_id)
        torch.manual_seed(seed_for(seed, 0))
        self.policy = Policy(*sizes(env)).to(device)
        self.optimizer = optim.Adam(self.policy.parameters(), lr=lr)
        self.reward_threshold = reward_threshold(env, threshold)
        self.env_id, self.seed, self.gamma, self.device = env_id, seed, gamma, device
        self.eps = np.finfo(np.float32).eps.item()
        self.running_reward, self.episodes, self.env_steps = 0.0, 0, 0
        self.staleness = []  # of every update of this run

    @property
    def solved(self):
        """Whether the running reward is above the threshold. Nothing is solved by not playing."""
        return self.episodes > 0 and self.running_reward > self.reward_threshold

    def until_solved(self, max_episodes):
        """Yield the number of each episode that is to be played: the first is 1."""
        while not self.solved and self.episodes < max_episodes:
            yield self.episodes + 1

    def learn(self, trajectories):
        """Finish an episode: update the policy once, from all steps of all observers; return the lowest reward.

        Source: tutorial part 1, Agent.finish_episode. Raises PermanentError if training diverged.
        """
        self.episodes += 1
        self.env_steps += sum(len(trajectory.actions) for trajectory in trajectories)
        self.staleness.append(max(trajectory.staleness for trajectory in trajectories))
        min_reward = min(sum(trajectory.rewards) for trajectory in trajectories)
        if self.episodes == 1:
            # Starting from 0 as the tutorial does would count as solved where rewards are negative.
            self.running_reward = min(0.0, min_reward)
        self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward

        loss = self.policy_loss(trajectories)
        check_finite(loss.item(), "policy's loss", self.episodes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return min_reward

    def policy_loss(self, trajectories):
        """Return REINFORCE's loss, a scalar tensor: - sum over all steps of log-probability times normalised return.

        In the tutorial the log-probabilities are collected step by step, each with a graph of its own. Here they are
        recomputed from states, actions and dropout masks in one forward pass: the same numbers, in every mode, hence
        the same gradients in every mode.
        """
        states_TD = np.concatenate([trajectory.states for trajectory in trajectories])
        states_TD = torch.as_tensor(states_TD, dtype=DTYPE, device=self.device)
        masks_TH = np.concatenate([trajectory.noise.masks(len(trajectory.actions)) for trajectory in trajectories])
        masks_TH = torch.as_tensor(masks_TH, device=self.device)
        actions_T = [action for trajectory in trajectories for action in trajectory.actions]
        actions_T = torch.tensor(actions_T, device=self.device)
        # Returns are counted within each observer's episode; nothing flows from one observer into the next.
        returns = [g for trajectory in trajectories for g in discounted(trajectory.rewards, self.gamma)]
        returns_T = torch.tensor(returns, dtype=DTYPE, device=self.device)
        if len(returns) > 1:  # the deviation of a single number is NaN, and one NaN would end all learning
            returns_T = (returns_T - returns_T.mean()) / (returns_T.std() + self.eps)

        log_probs_T = -F.cross_entropy(self.policy.scores(states_TD, masks_TH), actions_T, reduction="none")
        if not any(trajectory.staleness for trajectory in trajectories):
            return -(log_probs_T * returns_T).sum()
        played_T = torch.tensor([p for t in trajectories for p in t.probabilities], dtype=DTYPE, device=self.device)
        return -surrogate((log_probs_T - played_T.log()).exp(), returns_T).sum()

    def figures(self):
        """Return what a summary says of the learning; staleness is counted in updates, over those of this run."""
        return {
            "episodes": self.episodes,
            "env_steps": self.env_steps,
            "solved": self.solved,
            "running_reward": self.running_reward,
            "staleness_mean": round(statistics.mean(self.staleness or [0]), 3),
            "staleness_max": max(self.staleness, default=0),
        }

    def state_dict(self):
        """Return what a checkpoint holds: plain numbers and tensors."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "episode": self.episodes,
            "env_steps": self.env_steps,
            "running_reward": self.running_reward,
        }

    def load_state_dict(self, state):
        """Go on from a checkpoint, of any mode and world size."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.episodes, self.env_steps = state["episode"], state["env_steps"]
        self.running_reward = state["running_reward"]
