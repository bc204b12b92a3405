"""A source of tokens whose entropy rate is known exactly, so that one can tell how well a model of it can do.

Runs in the trainer process; corpus.py makes a text of it.

Shapes: V = tokens, S = 2V states of the source, K = successors that a state can be followed by, N = tokens of a text.
"""

import math
from bisect import bisect

import numpy as np
import torch


class MarkovSource:
    """A random source of tokens with memory: which tokens can follow depends on the last one, *and* on whether the
    one before it had an odd or an even id.  A bigram table cannot know the second part; an LSTM can learn it.

    Each of the S = 2V states has K successors with random probabilities, so its entropy rate is a finite sum.
    """

    def __init__(self, num_tokens, seed, successors=4):
        self.num_tokens = num_tokens
        num_states = 2 * num_tokens
        k = min(successors, num_tokens)
        rng = np.random.default_rng(seed)
        # K different tokens per state: sorted draws from a range that is K-1 shorter, spread by 0, 1, ... K-1.
        draws = np.sort(rng.integers(0, num_tokens - k + 1, size=(num_states, k)), axis=1)
        self.next_token_SK = draws + np.arange(k)
        self.prob_SK = rng.dirichlet(np.ones(k), size=num_states)
        # State s = (parity of the token before last) * V + last token.  The last token's parity comes along.
        last_S = np.arange(num_states) % num_tokens
        self.next_state_SK = (last_S % 2)[:, None] * num_tokens + self.next_token_SK
        self.stationary_S = self._stationary_distribution()

    def _stationary_distribution(self):
        """Return how often each state is visited in the long run, starting from state 0: power iteration, to 1e-13."""
        pi = np.zeros(len(self.prob_SK))
        pi[0] = 1.0
        for _ in range(100_000):
            flow = pi[:, None] * self.prob_SK
            after = np.bincount(self.next_state_SK.ravel(), flow.ravel(), minlength=len(pi))
            # Half a step instead of a whole one: the same fixed point, and a periodic chain converges too.
            moved = np.abs(after - pi).sum()
            pi = 0.5 * (pi + after)
            if moved < 1e-13:
                return pi
        raise ArithmeticError("the source's stationary distribution did not converge")

    def floor_perplexity(self):
        """Return exp of the entropy rate, sum over states of pi(s) * H(next token | s) in nats: exact, not an estimate.

        Source: Cover and Thomas, Elements of Information Theory, theorem 4.2.4.
        """
        return math.exp(-np.sum(self.stationary_S[:, None] * self.prob_SK * np.log(np.maximum(self.prob_SK, 1e-300))))

    def bigram_floor_perplexity(self):
        """Return the same for a model that sees only the last token: exp H(next | last), the two parities mixed."""
        last_SK = np.broadcast_to((np.arange(len(self.prob_SK)) % self.num_tokens)[:, None], self.prob_SK.shape)
        pairs, index = np.unique(last_SK * self.num_tokens + self.next_token_SK, return_inverse=True)
        joint = np.bincount(index.ravel(), (self.stationary_S[:, None] * self.prob_SK).ravel())
        last = np.bincount(pairs // self.num_tokens, joint, minlength=self.num_tokens)[pairs // self.num_tokens]
        seen = joint > 0
        return math.exp(-np.sum(joint[seen] * np.log(joint[seen] / last[seen])))

    def sample(self, length, seed):
        """Return `length` token ids, a tensor (N,), starting from a stationary state."""
        rng = np.random.default_rng(seed)
        # Lists, not arrays: a token at a time, Python's own bisect is ten times faster than numpy's.
        cumulative = np.cumsum(self.prob_SK, axis=1).tolist()
        next_token = self.next_token_SK.tolist()
        next_state = self.next_state_SK.tolist()
        last = self.prob_SK.shape[1] - 1
        state = int(rng.choice(len(next_state), p=self.stationary_S))
        ids = []
        for uniform in rng.random(length).tolist():
            k = min(bisect(cumulative[state], uniform), last)  # rounding may leave the last cumulative sum below 1
            ids.append(next_token[state][k])
            state = next_state[state][k]
        return torch.tensor(ids)


def spell_number(number):
    """Return a word for a number: syllables as digits ("ba", "be", ... "zu", "baba" is never needed for 0)."""
    word = ""
    while True:
        number, digit = divmod(number, 80)
        word += "bdfghjklmnprstvz"[digit // 5] + "aeiou"[digit % 5]
        if number == 0:
            return word
