"""Tokens to learn from: a text file of yours, or a generated source whose entropy rate is known exactly.

Runs in the trainer process only; the servers never see more than token ids.

Shapes: T = time steps of one batch (--bptt), B = parallel streams (--batch_size), N = tokens of a text,
S = states of the generated source, K = successors that a state can be followed by.
"""

import math
from bisect import bisect
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from glue.seeds import seed_for

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
EVAL_BATCH_SIZE = 10  # as in the word-language-model recipe


@dataclass
class Corpus:
    """What the trainer needs to know about a text. `vocabulary[i]` spells token id i; ids are int64 tensors (N,)."""

    name: str
    vocabulary: list
    train: torch.Tensor
    heldout: torch.Tensor
    separator: str  # between two tokens when ids are turned back into text
    floor: float | None = None  # perplexity that no model can beat in the long run; None where nobody knows it
    bigram_floor: float | None = None  # the same for a model that remembers one token only

    def __str__(self):
        text = (
            f"{len(self.train):,} tokens of {self.name} to train on, {len(self.heldout):,} held out, "
            f"V = {len(self.vocabulary):,}."
        )
        if self.floor:
            text += (
                f"\nNo model can get below a perplexity of {self.floor:.3f}, and none that looks back one word "
                f"only below {self.bigram_floor:.3f}."
            )
        return text

    def spell(self, ids):
        """Turn token ids back into text."""
        words = ("\n" if self.vocabulary[i] == END_OF_LINE else self.vocabulary[i] for i in ids)
        return self.separator.join(words)


def load_corpus(args):
    """The corpus that the command line asks for. Raises ValueError, in one line, for a file that is not a text."""
    if args.corpus:
        return corpus_from_file(args.corpus, args.tokens)
    return generated_corpus(args.vocabulary, args.corpus_tokens, args.seed)


# ------------------------------------------------------------------------------------------------- a generated text


class MarkovSource:
    """A random source of tokens with memory: which tokens can follow depends on the last one, *and* on whether the
    one before it had an odd or an even id. A bigram table cannot know the second part; an LSTM can learn it.

    Each of the S = 2V states has K successors with random probabilities, so its entropy rate is a finite sum.
    """

    def __init__(self, num_tokens, seed, successors=4):
        k = min(successors, num_tokens)
        rng = np.random.default_rng(seed)
        self.num_tokens, num_states = num_tokens, 2 * num_tokens
        # K different tokens per state: sorted draws from a range that is K-1 shorter, spread by 0, 1, ... K-1.
        draws = np.sort(rng.integers(0, num_tokens - k + 1, size=(num_states, k)), axis=1)
        self.next_token_SK = draws + np.arange(k)
        self.prob_SK = rng.dirichlet(np.ones(k), size=num_states)
        # State s = (parity of the token before last) * V + last token. The last token's parity comes along.
        last_S = np.arange(num_states) % num_tokens
        self.next_state_SK = (last_S % 2)[:, None] * num_tokens + self.next_token_SK
        self.stationary_S = self._stationary_distribution()

    def _stationary_distribution(self):
        """How often each state is visited in the long run, starting from state 0: power iteration, to 1e-13."""
        pi = np.zeros(len(self.prob_SK))
        pi[0] = 1.0
        for _ in range(100_000):
            flow = pi[:, None] * self.prob_SK
            after = np.bincount(self.next_state_SK.ravel(), flow.ravel(), minlength=len(pi))
            # Half a step instead of a whole one: the same fixed point, and a periodic chain converges too.
            moved, pi = np.abs(after - pi).sum(), 0.5 * (pi + after)
            if moved < 1e-13:
                return pi
        raise ArithmeticError("the source's stationary distribution did not converge")

    def floor_perplexity(self):
        """exp of the entropy rate, sum over states of pi(s) * H(next token | s) in nats: exact, not an estimate.

        Source: Cover and Thomas, Elements of Information Theory, theorem 4.2.4.
        """
        return math.exp(-np.sum(self.stationary_S[:, None] * self.prob_SK * np.log(np.maximum(self.prob_SK, 1e-300))))

    def bigram_floor_perplexity(self):
        """The same for a model that sees only the last token: exp H(next | last), the two parities mixed together."""
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
        cumulative, tokens = np.cumsum(self.prob_SK, axis=1).tolist(), self.next_token_SK.tolist()
        states, last = self.next_state_SK.tolist(), self.prob_SK.shape[1] - 1
        state, ids = int(rng.choice(len(states), p=self.stationary_S)), []
        for uniform in rng.random(length).tolist():
            k = min(bisect(cumulative[state], uniform), last)  # rounding may leave the last cumulative sum below 1
            ids.append(tokens[state][k])
            state = states[state][k]
        return torch.tensor(ids)


def spell_number(number):
    """A word for a number: syllables as digits ("ba", "be", ... "zu", "baba" is never needed for 0)."""
    word = ""
    while True:
        number, digit = divmod(number, 80)
        word += "bdfghjklmnprstvz"[digit // 5] + "aeiou"[digit % 5]
        if number == 0:
            return word


def generated_corpus(num_tokens, length, seed):
    """`length` tokens from a source that `seed` determines: nine tenths to train on, the last tenth held out."""
    source = MarkovSource(num_tokens, seed_for(seed, "source"))
    ids = source.sample(length, seed_for(seed, "sample"))
    train, heldout = _hold_out_the_end(ids)
    return Corpus(
        name=f"a generated source of {num_tokens} words",
        vocabulary=[spell_number(i) for i in range(num_tokens)],
        train=train,
        heldout=heldout,
        separator=" ",
        floor=source.floor_perplexity(),
        bigram_floor=source.bigram_floor_perplexity(),
    )


# --------------------------------------------------------------------------------------------------- a text of yours


def corpus_from_file(path, tokens):
    """Read a UTF-8 text; `tokens` is "char" or "word". Raises ValueError, in one line, for what is not a text."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ValueError(f"--corpus {path}: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")  # a byte order mark is not a letter
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is {data[error.start]:#04x}"
        raise ValueError(f"--corpus {path}: not a UTF-8 text ({where})") from None
    if "\0" in text:
        raise ValueError(f"--corpus {path}: not a text (it contains zero bytes)")
    if not text.strip():
        raise ValueError(f"--corpus {path}: there is no text in it")
    if tokens == "char":
        units = list(text)
    else:  # the recipe's way: words between white space, and a token of its own for the end of a line
        units = [word for line in text.splitlines() for word in (*line.split(), END_OF_LINE)]

    train, heldout = _hold_out_the_end(units)
    # The vocabulary is the training part's: a model that knew the held-out part's words would have seen the answers.
    # In word mode a word must occur twice. The others become <unk>, so that <unk> is seen, and learned, in training.
    seldom = 2 if tokens == "word" else 1
    known = [unit for unit, count in Counter(train).most_common() if count >= seldom]
    vocabulary = [UNKNOWN] + [unit for unit in known if unit != UNKNOWN]
    number = {unit: i for i, unit in enumerate(vocabulary)}

    def encode(units):
        return torch.tensor([number.get(unit, 0) for unit in units])

    separator = "" if tokens == "char" else " "
    return Corpus(f"{path} by {tokens}", vocabulary, encode(train), encode(heldout), separator)


def _hold_out_the_end(sequence):
    cut = len(sequence) - len(sequence) // 10
    return sequence[:cut], sequence[cut:]


# ----------------------------------------------------------------------------------------------------------- batches


def streams(ids, num_streams):
    """Cut a text (N,) into `num_streams` pieces that are read side by side: (N // B, B), one stream per column.

    What does not fill the last row is left out. Source: the word-language-model recipe, batchify.
    """
    steps = len(ids) // num_streams
    return ids[: steps * num_streams].view(num_streams, steps).t().contiguous()


def batches(stream, bptt):
    """Yield (input (T, B), targets (T, B)) down the streams; targets are the input one step later.

    Consecutive batches continue each other, so the hidden state carries over. The last one may have fewer steps.
    """
    for start in range(0, len(stream) - 1, bptt):
        steps = min(bptt, len(stream) - 1 - start)
        yield stream[start : start + steps], stream[start + 1 : start + 1 + steps]


def training_streams(corpus, batch_size, bptt):
    """Return (train (., B), held-out (., B')) streams. Raises ValueError if there is too little text for one batch."""
    train, needed = streams(corpus.train, batch_size), batch_size * (bptt + 1)
    if len(corpus.train) < needed:
        raise ValueError(
            f"{corpus.name}: {len(corpus.train)} tokens to train on are less than one batch, "
            f"{needed} = --batch_size {batch_size} x (--bptt {bptt} + 1)"
        )
    eval_batch_size = min(EVAL_BATCH_SIZE, len(corpus.heldout) // 2)
    if eval_batch_size == 0:
        raise ValueError(f"{corpus.name}: too short to hold out a tenth of it")
    return train, streams(corpus.heldout, eval_batch_size)
