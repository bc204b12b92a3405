"""The policy network, and how an action is drawn from its probabilities.

Runs in the agent, which owns and trains the policy. In `rollout` and `async` each observer acts with a copy.

Shapes: B = states (a single state has no axis B), D = observation features, H = hidden units, A = actions.
"""

import torch
import torch.nn.functional as F
from torch import nn

# Why float64: a matrix product of B rows may be rounded differently from B products of one row each; numpy may round
# differently from torch, and a GPU from a CPU. In float32 the probabilities then differ by 2.5e-8 on average, so that
# one action in about forty million is a different one, and from then on two modes play different episodes. In float64
# it is one action in 10^16.
DTYPE = torch.float64


class Policy(nn.Module):
    """The tutorial's Policy: Linear -> Dropout -> ReLU -> Linear -> softmax. Layer sizes fit the environment."""

    def __init__(self, num_features=4, num_actions=2, hidden=128, dropout=0.6):
        super().__init__()
        self.affine1 = nn.Linear(num_features, hidden, dtype=DTYPE)
        self.dropout = dropout
        self.affine2 = nn.Linear(hidden, num_actions, dtype=DTYPE)

    def forward(self, state_BD, mask_BH=None):
        """Return the probabilities of the actions (B, A).

        mask_BH is the dropout mask: 0 or 1/(1-p) for each hidden unit. None means no dropout, as in evaluation.
        nn.Dropout would draw the mask from the process's global generator, which all RPC threads share. Which observer
        gets which numbers would then depend on the order of the calls, which changes from run to run.
        """
        return F.softmax(self.scores(state_BD, mask_BH), dim=-1)

    def scores(self, state_BD, mask_BH=None):
        """Return the scores (B, A) of the actions: the inputs of the softmax in forward."""
        x = self.affine1(state_BD)
        if mask_BH is not None:
            x = x * mask_BH
        return self.affine2(F.relu(x))


def draw(weights, uniform):
    """Draw an action by means of `uniform`, a random number in [0, 1); return (the action, its probability).

    weights: a list of the A probabilities, or of A numbers in proportion to them. [0, 1) is divided in this proportion,
    and the action whose part contains `uniform` is drawn. Categorical(probs).sample() does the same with a random
    number of the process's global generator (see Policy.forward).
    """
    total = sum(weights)
    action = 0
    rest = uniform * total
    while rest >= weights[action] and action < len(weights) - 1:  # rounding must not lead past the last action
        rest -= weights[action]
        action += 1
    return action, weights[action] / total
