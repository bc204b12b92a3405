"""REINFORCE: the record of an episode, and the learner, which owns the policy. There is no RPC in this file.

REINFORCE plays an episode with actions that are drawn from the policy. Then it makes each of these actions more
probable, in proportion to its return: the discounted sum of the rewards that followed it. The returns are normalised,
so an action with a return below the average becomes less probable.

Shapes: T = environment steps of all episodes together, D = observation features.
"""

import dataclasses

from glue.training import check_finite

import numpy as np
import torch
import torch.nn.functional as F
from torch import optim

from policy import DTYPE

EPS = np.finfo(np.float32).eps.item()


@dataclasses.dataclass
class Trajectory:
    """One observer's episode: for each step the state (D,) before it, the action, and the reward after it."""

    states: list | np.ndarray = dataclasses.field(default_factory=list)  # in the end perhaps as one array (T, D)
    actions: list = dataclasses.field(default_factory=list)
    rewards: list = dataclasses.field(default_factory=list)


def reinforce_loss(policy, trajectories, gamma):
    """Return REINFORCE's loss, a scalar: minus the sum, over all steps, of log-probability times normalised return."""
    log_probs_T = log_probabilities(policy, trajectories)
    returns_T = normalised_returns(trajectories, gamma).to(log_probs_T.device)
    return -(log_probs_T * returns_T).sum()


def log_probabilities(policy, trajectories):
    """Return the log-probabilities (T,) of the actions that were taken, with an autograd graph.

    The tutorial keeps the log-probability of each step, with a graph of its own, until the episode ends. Here one
    forward pass computes all of them from the states and actions, which any process may have played.
    """
    scores_TA = policy.scores(np.concatenate([trajectory.states for trajectory in trajectories]))
    actions = [action for trajectory in trajectories for action in trajectory.actions]
    return -F.cross_entropy(scores_TA, torch.tensor(actions, device=scores_TA.device), reduction="none")


def normalised_returns(trajectories, gamma):
    """Return the returns (T,) of all steps, minus their mean and divided by their standard deviation."""
    returns = []
    for trajectory in trajectories:  # a return contains rewards of its own observer's episode only
        returns += discounted(trajectory.rewards, gamma)
    return normalised(torch.tensor(returns, dtype=DTYPE))


def normalised(returns_T):
    """Return these returns (T,), minus their mean and divided by their standard deviation."""
    if len(returns_T) > 1:  # the standard deviation of one number is NaN, which would spread to every weight
        returns_T = (returns_T - returns_T.mean()) / (returns_T.std() + EPS)
    return returns_T


def discounted(rewards, gamma):
    """Return the returns of one episode, a list: each is the step's reward plus gamma times the next step's return."""
    returns = []
    g = 0.0
    for reward in reversed(rewards):
        g = reward + gamma * g
        returns.append(g)
    return returns[::-1]


class Learner:  # in the agent, on its main thread
    """The policy, its optimizer, and what has been learned so far."""

    def __init__(self, policy, lr, gamma, reward_threshold):
        """`reward_threshold`: the running reward above which the environment counts as solved."""
        self.policy = policy
        self.optimizer = optim.Adam(policy.parameters(), lr=lr)
        self.gamma = gamma
        self.reward_threshold = reward_threshold
        self.running_reward = 0.0
        self.episodes = 0  # counts updates: of an episode of each observer (`async`: of one; `vector`: of each game)
        self.env_steps = 0

    def learn(self, trajectories, loss):
        """Make one update of the policy by the loss of these episodes; return the lowest of their total rewards."""
        min_reward = min(sum(trajectory.rewards) for trajectory in trajectories)
        self.update(sum(len(trajectory.actions) for trajectory in trajectories), min_reward, [loss])
        return min_reward

    def update(self, env_steps, min_reward, losses):
        """Make one update of the policy by the sum of these losses, from so many steps.

        `min_reward`: the lowest total reward of these episodes. `losses` may be an iterator, which computes each loss
        only when the one before needs no memory any more.
        Raises UserError if training has diverged.
        """
        self.episodes += 1
        self.env_steps += env_steps
        if self.episodes == 1:
            # The tutorial always starts at 0. Where rewards are negative, 0 can be above the threshold.
            self.running_reward = min(0.0, min_reward)
        self.running_reward = 0.05 * min_reward + (1 - 0.05) * self.running_reward
        self.optimizer.zero_grad()
        for loss in losses:
            check_finite(loss, "policy's loss", self.episodes)
            loss.backward()  # adds to the gradients of the losses before
        self.optimizer.step()

    @property
    def solved(self):
        """Whether the running reward is above the threshold; False before the first episode."""
        return self.episodes > 0 and self.running_reward > self.reward_threshold

    def state_dict(self):
        """Return the contents of a checkpoint: plain numbers and tensors."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "episodes": self.episodes,
            "env_steps": self.env_steps,
            "running_reward": self.running_reward,
        }

    def load_state_dict(self, state):
        """Continue from a checkpoint, which may be of any mode and any world size. --lr may have another value."""
        self.policy.load_state_dict(state["policy"])
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = lr  # without this line, the checkpoint's learning rate would be used
        self.episodes = state["episodes"]
        self.env_steps = state["env_steps"]
        self.running_reward = state["running_reward"]
