"""The policy network, and the random numbers that an episode is played with.

Runs in the agent, which owns and trains it, and in every observer in mode `rollout`, which acts with a copy of it.

Shapes: B = states answered together (1, or one per observer), T = steps of an episode, D = observation features,
H = hidden units, A = actions.
"""

import math
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

# Why float64: a matrix product over B rows may round differently from B products over one row, and a GPU rounds
# differently from a CPU. In float32 the probabilities then differ by 2.5e-8 on average, so one action in some forty
# million is another one, and from there on two modes play different games. In float64 it is one in 10^16.
DTYPE = torch.float64

# Of Actor's operators, once training has diverged. The learner says so in one line, when it looks at the loss.
warnings.filterwarnings("ignore", r"(overflow|invalid value) encountered in (dot|multiply|add)", module="policy")


class Policy(nn.Module):
    """The tutorial's Policy: Linear -> Dropout -> ReLU -> Linear -> softmax; the layer sizes follow the environment."""

    def __init__(self, num_features=4, num_actions=2, hidden=128, dropout=0.6):
        super().__init__()
        self.affine1 = nn.Linear(num_features, hidden, dtype=DTYPE)
        self.dropout = dropout
        self.affine2 = nn.Linear(hidden, num_actions, dtype=DTYPE)

    def forward(self, state_BD, mask_BH=None):
        """Return action probabilities (B, A).

        mask_BH is the dropout mask, 0 or 1/(1-p) per unit, made by EpisodeNoise; None: no dropout, as in evaluation.
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


class Actor:
    """Chooses actions by a Policy, for one state or a few: by its forward pass, or on the CPU by the same in numpy.

    For so few states nearly all of torch's 45 µs is the calling of ten operators; numpy takes 4. There are no gradients
    here: Learner.policy_loss recomputes the log-probabilities with them, for all steps at once.
    """

    def __init__(self, policy):
        self.policy, self.device = policy, policy.affine1.weight.device
        # Views of the parameters' own memory: what an optimizer or load_state_dict writes there is seen here.
        # (Only policy.to(...) lets parameters move: make an Actor after that.)
        self.views = [p.detach().numpy().T for p in policy.parameters()] if self.device.type == "cpu" else None

    def scores(self, states, masks=None):
        """Return Policy.scores of one state (D,) as a list of A floats, of states (B, D) as B such lists.

        Both arguments are numpy arrays; there is a mask (H,) for each state, or none.
        """
        if self.views is None:
            states = torch.as_tensor(states, dtype=DTYPE, device=self.device)
            masks = None if masks is None else torch.as_tensor(masks, device=self.device)
            with torch.no_grad():
                return self.policy.scores(states, masks).tolist()
        weight1_DH, bias1_H, weight2_HA, bias2_A = self.views
        x = states.dot(weight1_DH)
        x += bias1_H
        if masks is not None:
            x *= masks
        np.maximum(x, 0.0, out=x)
        x = x.dot(weight2_HA)
        x += bias2_A
        return x.tolist()

    def act(self, state, mask_H, uniform):
        """Draw an action for one state (D,); return (the action, its probability). uniform: a float in [0, 1)."""
        return draw(self.scores(state, mask_H), uniform)

    def act_greedily(self, state):
        """Return the most probable action for one state (D,), dropout off."""
        scores = self.scores(state)
        return scores.index(max(scores))


def draw(scores, uniform):
    """Return (action, its probability): the action in whose slice of [0, 1) the uniform number falls.

    Does what Categorical(logits=scores).sample() of torch.distributions does, with a random number that the caller
    brings along, and at a tenth of its cost for a handful of actions.
    """
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    total = sum(powers)
    action, rest = 0, uniform * total
    while rest >= powers[action] and action < len(powers) - 1:  # the latter: rounding may leave a rest
        rest -= powers[action]
        action += 1
    return action, powers[action] / total


class EpisodeNoise:
    """Every random number that one observer's steps of one episode consume: step t's action draw and dropout mask.

    They depend on the seed alone, not on which process asks, when, or how many steps at a time. So the agent and the
    observer each make them where they need them, and none ever crosses the wire.
    Not locked: an instance is used for one observer, and an observer has one call under way at a time.
    """

    BLOCK = 128  # steps drawn at once: a call per step would cost more than the forward pass

    def __init__(self, seed, policy):
        self.hidden, self.dropout = policy.affine1.out_features, policy.dropout
        self.generator = np.random.default_rng(seed)
        self.uniforms, self.masks_BH = [], []

    def at(self, t):
        """Return (uniform, mask_H) of step t: a float in [0, 1) and an array."""
        self._draw_up_to(t + 1)
        return self.uniforms[t], self.masks_BH[t // self.BLOCK][t % self.BLOCK]

    def masks(self, steps):
        """Return the dropout masks of the episode's first `steps` steps, a (T, H) array."""
        self._draw_up_to(steps)
        return np.concatenate(self.masks_BH)[:steps]

    def _draw_up_to(self, steps):
        while len(self.uniforms) < steps:
            block = self.generator.random((self.BLOCK, 1 + self.hidden))
            self.uniforms += block[:, 0].tolist()
            self.masks_BH.append((block[:, 1:] >= self.dropout) / (1 - self.dropout))
