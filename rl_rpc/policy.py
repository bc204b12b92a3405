"""The policy network, and how an action is drawn from its probabilities.

Shapes: B = states (a single state has no axis B), D = observation features, A = actions.
"""

import bisect
import itertools

import torch
import torch.nn.functional as F
from torch import nn

# A product of B rows, B products of one row, numpy and a GPU all round differently. In float32 such a difference would
# change one action in about forty million, and from then on two modes would play different episodes. In float64 it
# is one in 10^16.
DTYPE = torch.float64


class Policy(nn.Module):
    """Source: tutorial, Policy, but without its dropout (difference 12). Layer sizes fit the environment."""

    def __init__(self, num_features, num_actions):
        super().__init__()
        self.affine1 = nn.Linear(num_features, 128, dtype=DTYPE)
        self.affine2 = nn.Linear(128, num_actions, dtype=DTYPE)

    def forward(self, states_BD):
        """Return the probabilities (B, A) of the actions."""
        return F.softmax(self.scores(states_BD), dim=-1)

    def scores(self, states_BD):
        """Return the scores (B, A) of the actions, which the softmax turns into probabilities."""
        # States come as a numpy array. They are copied to the device of the policy.
        states_BD = torch.as_tensor(states_BD, dtype=DTYPE, device=self.affine1.weight.device)
        return self.affine2(F.relu(self.affine1(states_BD)))


def draw(probs, rng):
    """Draw an action: the index of one of the A probabilities, a list. `rng` is a random.Random.

    Categorical(probs).sample() would draw from the process's only generator. The order in which the observers' calls
    arrive would then decide which of them gets which random number (difference 9).
    """
    upper_bounds = list(itertools.accumulate(probs[:-1]))  # [0, 1) is divided among the actions
    return bisect.bisect(upper_bounds, rng.random())
