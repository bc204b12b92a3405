"""A random source of tokens with a known entropy rate, so that the lowest possible perplexity of a model is known.

Runs in the trainer process. corpus.py makes a text from it.

Shapes: V = tokens, S = 2V states of the source, K = tokens that can follow a state, N = tokens of a text.
"""

import math
from bisect import bisect

import numpy as np
import torch

MOST_SUCCESSORS = 4  # K, unless there are fewer tokens


class MarkovSource:
    """A random source of tokens that remembers two tokens.

    The next token depends on the last token, *and* on whether the id of the token before the last is odd or even. A
    model that uses only the last token cannot use the second fact. An LSTM can learn it.

    The source has S = 2V states. In each of them K tokens can follow, with random probabilities. So the entropy rate
    is a finite sum.
    """

    def __init__(self, num_tokens, seed):
        self.num_tokens = num_tokens
        num_states = 2 * num_tokens
        k = min(MOST_SUCCESSORS, num_tokens)
        rng = np.random.default_rng(seed)
        # K different tokens per state: sorted draws from V - K + 1 numbers, to which 0, 1, ... K - 1 are added.
        draws = np.sort(rng.integers(0, num_tokens - k + 1, size=(num_states, k)), axis=1)
        self.next_token_SK = draws + np.arange(k)
        self.prob_SK = rng.dirichlet(np.ones(k), size=num_states)
        # State s = (parity of the token before the last) * V + last token. In the next state, the parity is that of
        # the last token.
        last_S = np.arange(num_states) % num_tokens
        self.next_state_SK = (last_S % 2)[:, None] * num_tokens + self.next_token_SK
        self.stationary_S = self._stationary_distribution()

    def _stationary_distribution(self):
        """Return the long-run frequency of each state, if the source starts in state 0.

        This is power iteration, until the change is below 1e-13.
        """
        pi = np.zeros(len(self.prob_SK))
        pi[0] = 1.0
        for _ in range(100_000):
            flow = pi[:, None] * self.prob_SK
            after = np.bincount(self.next_state_SK.ravel(), flow.ravel(), minlength=len(pi))
            # The mean of the old and the new value has the same fixed point, and converges for a periodic chain too.
            moved = np.abs(after - pi).sum()
            pi = 0.5 * (pi + after)
            if moved < 1e-13:
                return pi
        raise ArithmeticError("the source's stationary distribution did not converge")

    def floor_perplexity(self):
        """Return exp(entropy rate), the lowest possible perplexity. It is exact, and not estimated from a sample.

        The entropy rate in nats is the sum of pi(s) * H(next token | s) over all states s.
        Source: Cover and Thomas, Elements of Information Theory, theorem 4.2.4.
        """
        log_prob_SK = np.log(np.maximum(self.prob_SK, 1e-300))  # 0 * log(0) counts as 0
        entropy_S = -np.sum(self.prob_SK * log_prob_SK, axis=1)
        return math.exp(np.sum(self.stationary_S * entropy_S))

    def bigram_floor_perplexity(self):
        """Return exp(H(next token | last token)), the lowest perplexity of a model that uses only the last token."""
        last_SK = np.broadcast_to((np.arange(len(self.prob_SK)) % self.num_tokens)[:, None], self.prob_SK.shape)
        # A pair (last token, next token) is one number here: last * V + next.
        pairs, index = np.unique(last_SK * self.num_tokens + self.next_token_SK, return_inverse=True)
        # The probability of each pair, and of its last token.
        pair_prob = np.bincount(index.ravel(), (self.stationary_S[:, None] * self.prob_SK).ravel())
        last_token = pairs // self.num_tokens
        last_prob = np.bincount(last_token, pair_prob, minlength=self.num_tokens)[last_token]
        seen = pair_prob > 0
        return math.exp(-np.sum(pair_prob[seen] * np.log(pair_prob[seen] / last_prob[seen])))

    def sample(self, length, seed):
        """Return `length` token ids, a tensor (N,). The first state is drawn from the stationary distribution."""
        rng = np.random.default_rng(seed)
        # Lists and not arrays, because for one token at a time Python's bisect is ten times faster than numpy's.
        cumulative = np.cumsum(self.prob_SK, axis=1).tolist()
        next_token = self.next_token_SK.tolist()
        next_state = self.next_state_SK.tolist()
        last_place = self.prob_SK.shape[1] - 1
        state = int(rng.choice(len(next_state), p=self.stationary_S))
        ids = []
        for uniform in rng.random(length).tolist():
            place = min(bisect(cumulative[state], uniform), last_place)  # rounding may leave the last sum below 1
            ids.append(next_token[state][place])
            state = next_state[state][place]
        return torch.tensor(ids)
