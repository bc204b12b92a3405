"""The random numbers that one observer's episode is played with: the environment's seed, and what actions are drawn by.

EpisodeNoise is made in the agent, and in `rollout` and `async` in the observer as well. None of it crosses the wire.

Shapes: T = steps of the episode, H = hidden units of the policy.
"""

import numpy as np

from glue.tensors import seed_for


def environment_seed(seed, ob_id, episode):
    """Return the seed of one observer's reset of one episode. The tutorial gave all observers the same.

    Seeding every episode, and not only the first, makes an episode a function of (seed, observer, episode, weights):
    what a resumed run plays does not depend on what was played before it.
    """
    return seed_for(seed, ob_id, episode, 0)


class EpisodeNoise:
    """Every random number that one observer's steps of one episode use: step t's action draw and its dropout mask.

    They depend on the seed, the observer and the episode alone, not on which process asks, when, or how many steps at a
    time: so all modes play the same episodes.
    Not locked: an instance is used for one observer, and an observer has one call under way at a time.
    """

    BLOCK = 128  # steps drawn at once: a call for each step would cost `rollout` more than its forward pass

    def __init__(self, seed, ob_id, episode, policy):
        self.hidden = policy.affine1.out_features
        self.dropout = policy.dropout
        # numpy's generator, not glue.tensors.dropout_mask: it draws a block in four fifths of the time.
        self.generator = np.random.default_rng(seed_for(seed, ob_id, episode, 1))
        self.uniforms = []
        self.masks_BH = []  # one array for each block

    def at(self, t):
        """Return (uniform, mask_H) of step t: a float in [0, 1), and an array of 0 or 1/(1-p) for each hidden unit."""
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
