"""The policy network, and how an action is drawn from what it says.

Runs in the agent, which owns and trains it, and in every observer in mode `rollout`, which acts with a copy of it.

Shapes: B = states (none for a single one), D = observation features, H = hidden units, A = actions.
"""

import torch
import torch.nn.functional as F
from torch import nn

# Why float64: a matrix product over B rows may round differently from B products over one row, numpy differently from
# torch, and a GPU differently from a CPU. In float32 the probabilities then differ by 2.5e-8 on average, so one action
# in some forty million is another one, and from there on two modes play different games. In float64 it is one in 10^16.
DTYPE = torch.float64


class Policy(nn.Module):
    """The tutorial's Policy: Linear -> Dropout -> ReLU -> Linear -> softmax; the layer sizes follow the environment."""

    def __init__(self, num_features=4, num_actions=2, hidden=128, dropout=0.6):
        super().__init__()
        self.affine1 = nn.Linear(num_features, hidden, dtype=DTYPE)
        self.dropout = dropout
        self.affine2 = nn.Linear(hidden, num_actions, dtype=DTYPE)

    def forward(self, state_BD, mask_BH=None):
        """Return the probabilities of the actions (B, A).

        mask_BH is the dropout mask, 0 or 1/(1-p) for each unit; None: no dropout, as in evaluation.
        nn.Dropout would draw the mask from the process's global generator, which RPC threads share: two observers
        answered at once would take their draws in an order that changes from run to run.
        """
        return F.softmax(self.scores(state_BD, mask_BH), dim=-1)

    def scores(self, state_BD, mask_BH=None):
        """Return what forward takes the softmax of."""
        x = self.affine1(state_BD)
        if mask_BH is not None:
            x = x * mask_BH
        return self.affine2(F.relu(x))


def draw(weights, uniform):
    """Return (action, its probability): the action in whose part of [0, 1) the uniform number falls.

    `weights`: a list of the A probabilities, or of numbers in proportion to them. Categorical(probs).sample() does the
    same with a random number of the process's own generator (see Policy.forward).
    """
    total = sum(weights)
    action = 0
    rest = uniform * total
    while rest >= weights[action] and action < len(weights) - 1:  # the latter: rounding may leave a rest
        rest -= weights[action]
        action += 1
    return action, weights[action] / total
