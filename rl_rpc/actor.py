"""The forward pass of the policy in numpy, which chooses the actions of the faster modes and of the greedy evaluation.

Runs in the agent (`packed`, `batched`), in the observers (`rollout`, `async`), and in play.py.

Shapes: B = states that are answered together, D = observation features, H = hidden units, A = actions.
"""

import math
import warnings

import numpy as np
import torch

from policy import DTYPE, draw

# numpy warns if training has diverged. The agent then ends the run with one line, as soon as it computes the loss.
warnings.filterwarnings("ignore", r"(overflow|invalid value) encountered in (dot|multiply|add)", module="actor")


class Actor:
    """Chooses actions by a Policy, for one state or a few. For a policy on the CPU it computes in numpy.

    For one state, torch takes 45 µs, nearly all of them to call its operators; numpy takes 4 µs (RESULTS.md). An Actor
    makes no autograd graph: reinforce.py computes the log-probabilities again, for all steps in one forward pass.
    """

    def __init__(self, policy):
        self.policy = policy
        self.device = policy.affine1.weight.device
        # Views of the memory of the parameters. So an Actor always computes with the current weights, also after an
        # optimizer or load_state_dict has changed them. (policy.to(...) may move the weights: make a new Actor then.)
        self.views = [p.detach().numpy().T for p in policy.parameters()] if self.device.type == "cpu" else None

    def scores(self, states, masks=None):
        """Return Policy.scores: a list of A floats for one state (D,), or B such lists for states (B, D).

        Both arguments are numpy arrays. masks has a dropout mask (H,) for each state; None means no dropout.
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
        """Draw an action for one state (D,); return (the action, its probability). uniform is a float in [0, 1)."""
        return draw_from_scores(self.scores(state, mask_H), uniform)

    def act_greedily(self, state):
        """Return the most probable action for one state (D,), without dropout."""
        scores = self.scores(state)
        return scores.index(max(scores))


def draw_from_scores(scores, uniform):
    """Draw an action from the softmax of the scores, a list of A floats; return (the action, its probability)."""
    top = max(scores)
    return draw([math.exp(score - top) for score in scores], uniform)
