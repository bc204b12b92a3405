"""REINFORCE: the record of an episode, and the loss by which the policy learns from it. There is no RPC in this file.

Runs in the agent (rank 0), on its main thread.

REINFORCE plays an episode with actions that are drawn from the policy. Then it makes each of these actions more
probable, in proportion to its return: the discounted sum of the rewards that followed it. The returns are normalised,
so an action with a return below the average becomes less probable.

Shapes: T = environment steps of all episodes together, D = observation features, H = hidden units.
"""

import numpy as np
import torch
import torch.nn.functional as F

from policy import DTYPE

EPS = np.finfo(np.float32).eps.item()


class Trajectory:
    """The states, actions and rewards of one observer's episode, and `noise`, the random numbers that it uses."""

    def __init__(self, noise):
        self.noise = noise
        self.states = []
        self.actions = []
        self.rewards = []


def reinforce_loss(policy, trajectories, gamma):
    """Return REINFORCE's loss, a scalar: minus the sum, over all steps, of log-probability times normalised return."""
    log_probs_T = log_probabilities(policy, trajectories)
    returns_T = normalised_returns(trajectories, gamma).to(log_probs_T.device)
    return -(log_probs_T * returns_T).sum()


def log_probabilities(policy, trajectories):
    """Return the log-probabilities (T,) of the actions that were taken, with an autograd graph.

    The tutorial keeps the log-probability of each step, with a graph of its own, until the episode ends. This function
    computes all of them in one forward pass, from the states, actions and dropout masks. The numbers and the gradients
    are the same, and so is the code for all modes.
    """
    device = policy.affine1.weight.device
    states_TD = np.concatenate([trajectory.states for trajectory in trajectories])
    states_TD = torch.as_tensor(states_TD, dtype=DTYPE, device=device)
    masks_TH = np.concatenate([trajectory.noise.masks(len(trajectory.actions)) for trajectory in trajectories])
    masks_TH = torch.as_tensor(masks_TH, device=device)
    actions_T = torch.tensor([a for trajectory in trajectories for a in trajectory.actions], device=device)
    return -F.cross_entropy(policy.scores(states_TD, masks_TH), actions_T, reduction="none")


def normalised_returns(trajectories, gamma):
    """Return the returns (T,) of all steps, minus their mean and divided by their standard deviation."""
    returns = []
    for trajectory in trajectories:  # a return contains rewards of its own observer's episode only
        returns += discounted(trajectory.rewards, gamma)
    returns_T = torch.tensor(returns, dtype=DTYPE)
    if len(returns) > 1:  # the standard deviation of one number is NaN, which would spread to every weight
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
