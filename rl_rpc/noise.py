"""All random numbers of an observer's episode: the seed of the environment, the draws of actions, the dropout masks.

Runs in the agent, and in modes `rollout` and `async` in the observers too. These numbers are never sent to another
process: each process that needs them computes them from the seed.

Shapes: T = environment steps of the episode, H = hidden units of the policy.
"""

import numpy as np

from glue.seeds import seed_for


def environment_seed(seed, ob_id, episode):
    """Return the seed with which an observer resets its environment for an episode.

    Every episode has a seed of its own. So an episode depends only on the run's seed, the observer, the number of the
    episode and the weights, and a resumed run plays the same episodes as a run without an interruption. (The tutorial
    gives all observers the same seed, and only once.)
    """
    return seed_for(seed, ob_id, episode, 0)


class EpisodeNoise:
    """The random numbers of one observer's episode: for each step, the draw of the action and a dropout mask.

    They depend only on the run's seed, the observer and the episode. They do not depend on the process that computes
    them, on the time, or on how many steps are asked for at once. So all modes play the same episodes.
    It needs no lock: an instance belongs to one observer, and an observer has one call at a time.
    """

    BLOCK = 128  # steps whose numbers are drawn together; in `rollout` a draw for each step takes longer than acting

    def __init__(self, seed, ob_id, episode, policy):
        self.hidden = policy.affine1.out_features
        self.dropout = policy.dropout
        # numpy's generator draws a block in four fifths of the time of glue.seeds.dropout_mask.
        self.generator = np.random.default_rng(seed_for(seed, ob_id, episode, 1))
        self.uniforms = []  # one float for each step
        self.masks_BH = []  # one array (BLOCK, H) for each block of steps

    def at(self, t):
        """Return (uniform, mask_H) of step t: a float in [0, 1), and an array of 0 or 1/(1-p) for each hidden unit."""
        self._draw_up_to(t + 1)
        return self.uniforms[t], self.masks_BH[t // self.BLOCK][t % self.BLOCK]

    def masks(self, steps):
        """Return the dropout masks of the first `steps` steps of the episode, an array (T, H)."""
        self._draw_up_to(steps)
        return np.concatenate(self.masks_BH)[:steps]

    def _draw_up_to(self, steps):
        while len(self.uniforms) < steps:
            block = self.generator.random((self.BLOCK, 1 + self.hidden))
            self.uniforms += block[:, 0].tolist()
            self.masks_BH.append((block[:, 1:] >= self.dropout) / (1 - self.dropout))
