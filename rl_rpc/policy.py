"""The policy network, and the random numbers that an episode is played with.

Runs in the agent, which owns and trains it, and in every observer in mode `rollout`, which acts with a copy of it.

Shapes: B = states answered together (1, or one per observer), T = steps of an episode, D = observation features,
H = hidden units, A = actions.
"""

import torch
import torch.nn.functional as F
from torch import nn

# Why float64: a matrix product over B rows may round differently from B products over one row, and a GPU rounds
# differently from a CPU. In float32 the probabilities then differ by 2.5e-8 on average, so one action in some forty
# million is another one, and from there on two modes play different games. In float64 it is one in 10^16.
DTYPE = torch.float64


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
        x = self.affine1(state_BD)
        if mask_BH is not None:
            x = x * mask_BH
        return F.softmax(self.affine2(F.relu(x)), dim=-1)

    @torch.no_grad()  # log-probabilities are recomputed with gradient in Learner.policy_loss, all steps at once
    def act(self, states_BD, mask_BH, uniforms):
        """Draw one action per state; return a list of B ints.

        states_BD: B states as one numpy array, as environments give them; uniforms: B floats in [0, 1).
        """
        weight = self.affine1.weight
        states_BD = torch.as_tensor(states_BD, dtype=weight.dtype, device=weight.device)
        return [draw(probs, u) for probs, u in zip(self(states_BD, mask_BH).tolist(), uniforms, strict=True)]

    @torch.no_grad()
    def act_greedily(self, state):
        """Return the most probable action for one state (D,), dropout off."""
        weight = self.affine1.weight
        return int(self(torch.as_tensor(state, dtype=weight.dtype, device=weight.device)).argmax())


def draw(probs, uniform):
    """Return the action in whose slice of [0, 1) the uniform number falls: the inverse of the distribution.

    Does what torch.distributions.Categorical(probs).sample() does, with a random number that the caller brings along,
    and at a tenth of its cost for a handful of actions.
    """
    for action, p in enumerate(probs):
        uniform -= p
        if uniform < 0:
            return action
    return len(probs) - 1  # the probabilities summed to 0.999…


class EpisodeNoise:
    """Every random number that one observer's steps of one episode consume: step t's action draw and dropout mask.

    They depend on the seed alone, not on which process asks, when, or how many steps at a time. So the agent and the
    observer each make them where they need them, and none ever crosses the wire.
    Not locked: an instance is used for one observer, and an observer has one call under way at a time.
    """

    BLOCK = 128  # steps drawn at once: a torch call per step would cost more than the forward pass

    def __init__(self, seed, policy):
        weight = policy.affine1.weight
        self.hidden, self.dropout, self.device = weight.shape[0], policy.dropout, weight.device
        # mt19937 on the CPU also when the policy is on a GPU: the numbers must be the same on either.
        self.generator = torch.Generator().manual_seed(seed)
        self.uniforms, self.masks_BH = [], []

    def at(self, t):
        """Return (uniform, mask_BH) of step t: a float in [0, 1) and a (1, H) tensor."""
        self._draw_up_to(t + 1)
        block_BH = self.masks_BH[t // self.BLOCK]
        start = t % self.BLOCK
        return self.uniforms[t], block_BH[start : start + 1]

    def masks(self, steps):
        """Return the dropout masks of the episode's first `steps` steps, (T, H)."""
        self._draw_up_to(steps)
        return torch.cat(self.masks_BH)[:steps]

    def _draw_up_to(self, steps):
        while len(self.uniforms) < steps:
            block = torch.rand(self.BLOCK, 1 + self.hidden, generator=self.generator, dtype=DTYPE)
            self.uniforms += block[:, 0].tolist()
            keep_BH = block[:, 1:] >= self.dropout
            self.masks_BH.append((keep_BH.to(DTYPE) / (1 - self.dropout)).to(self.device))
