"""The policy's forward pass in numpy, for whoever plays alone: the observers of `rollout` and `async`, and play.py.

Shapes: D = observation features, H = hidden units, A = actions.
"""

import math
import warnings

import numpy as np

# numpy warns if training has diverged. The agent then ends the run with one line, as soon as it computes the loss.
warnings.filterwarnings("ignore", r"(overflow|invalid value) encountered", module="actor")


class Actor:
    """Computes a Policy on the CPU for one state. numpy takes 4 µs, torch 45 µs, nearly all to call its operators."""

    def __init__(self, policy):
        # Views of the memory of the parameters: an optimizer or load_state_dict changes what the Actor computes.
        self.views = [p.detach().numpy().T for p in policy.parameters()]

    def scores(self, state):
        """Return Policy.scores for a state (D,), a numpy array, as a list of A floats."""
        weight1_DH, bias1_H, weight2_HA, bias2_A = self.views
        hidden_H = np.maximum(state.dot(weight1_DH) + bias1_H, 0.0)
        return (hidden_H.dot(weight2_HA) + bias2_A).tolist()

    def probs(self, state):
        """Return the probabilities of the actions, a list of A floats."""
        scores = self.scores(state)
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        total = sum(weights)
        return [weight / total for weight in weights]

    def act_greedily(self, state):
        """Return the most probable action for a state."""
        scores = self.scores(state)
        return scores.index(max(scores))
