"""Acting by a policy in numpy: for the modes that are faster than the tutorial's, and for the greedy evaluation.

Runs in the agent in `packed` and `batched`, in the observers in `rollout` and `async`, and in play.py.

Shapes: B = states answered together, D = observation features, H = hidden units, A = actions.
"""

import math
import warnings

import numpy as np
import torch

from policy import DTYPE, draw

# Of Actor's operators, once training has diverged. The agent says so in one line, when it looks at the loss.
warnings.filterwarnings("ignore", r"(overflow|invalid value) encountered in (dot|multiply|add)", module="actor")


class Actor:
    """Chooses actions by a Policy, for one state or a few: on the CPU by its forward pass written in numpy.

    For one state, torch takes 45 µs, nearly all of it to call its operators; numpy takes 4 (RESULTS.md). There are no
    gradients here: reinforce.py computes the log-probabilities again, for all steps at once.
    """

    def __init__(self, policy):
        self.policy = policy
        self.device = policy.affine1.weight.device
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
        return draw_from_scores(self.scores(state, mask_H), uniform)

    def act_greedily(self, state):
        """Return the most probable action for one state (D,), dropout off."""
        scores = self.scores(state)
        return scores.index(max(scores))


def draw_from_scores(scores, uniform):
    """Return (action, its probability), drawn from the softmax of A scores, a list."""
    top = max(scores)
    return draw([math.exp(score - top) for score in scores], uniform)
