"""REINFORCE: what an episode was, and the loss by which the policy learns from it. There is no RPC in this file.

Runs in the agent (rank 0), on its main thread.

REINFORCE in two lines: play an episode with actions drawn from the policy; then make each action taken more probable
in proportion to its return, the discounted sum of the rewards that followed it (less than average: less probable).

Shapes: T = steps of all episodes together, D = observation features, H = hidden units.
"""

import numpy as np
import torch
import torch.nn.functional as F

from policy import DTYPE

EPS = np.finfo(np.float32).eps.item()


class Trajectory:
    """What one observer saw, did and earned in one episode, with the random numbers that it was played with."""

    def __init__(self, noise):
        self.noise = noise
        self.states = []
        self.actions = []
        self.rewards = []


def reinforce_loss(policy, trajectories, gamma):
    """Return REINFORCE's loss, a scalar tensor: - sum over all steps of log-probability times normalised return."""
    log_probs_T = log_probabilities(policy, trajectories)
    returns_T = normalised_returns(trajectories, gamma).to(log_probs_T.device)
    return -(log_probs_T * returns_T).sum()


def log_probabilities(policy, trajectories):
    """Return the log-probability (T,) that the policy gives to each action that was taken, with a graph.

    In the tutorial these are kept step by step, each with a graph of its own. Here they are computed again from
    states, actions and dropout masks in one forward pass: the same numbers and the same gradients, in every mode.
    """
    device = policy.affine1.weight.device
    states_TD = np.concatenate([trajectory.states for trajectory in trajectories])
    states_TD = torch.as_tensor(states_TD, dtype=DTYPE, device=device)
    masks_TH = np.concatenate([trajectory.noise.masks(len(trajectory.actions)) for trajectory in trajectories])
    masks_TH = torch.as_tensor(masks_TH, device=device)
    actions_T = torch.tensor([a for trajectory in trajectories for a in trajectory.actions], device=device)
    return -F.cross_entropy(policy.scores(states_TD, masks_TH), actions_T, reduction="none")


def normalised_returns(trajectories, gamma):
    """Return the return of each step (T,), less their mean, divided by their standard deviation."""
    returns = []
    for trajectory in trajectories:  # counted within each observer's episode; nothing flows from one into the next
        returns += discounted(trajectory.rewards, gamma)
    returns_T = torch.tensor(returns, dtype=DTYPE)
    if len(returns) > 1:  # the deviation of a single number is NaN, and one NaN would end all learning
        returns_T = (returns_T - returns_T.mean()) / (returns_T.std() + EPS)
    return returns_T


def discounted(rewards, gamma):
    """Return the return of every step of one episode: its reward plus gamma times the next step's return."""
    returns = []
    g = 0.0
    for reward in reversed(rewards):
        g = reward + gamma * g
        returns.append(g)
    return returns[::-1]
