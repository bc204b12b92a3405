"""Tokens to learn from: a text file of yours, or a generated source whose entropy rate is known exactly.

Runs in the trainer process only; the servers never see more than token ids.

Shapes: T = time steps of one batch (--bptt), B = parallel streams (--batch_size), N = tokens of a text.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass

import torch

from glue import PermanentError
from glue.tensors import seed_for
from markov_source import MarkovSource, spell_number

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
EVAL_BATCH_SIZE = 10  # as in the word-language-model recipe


@dataclass
class Corpus:
    """What the trainer needs to know about a text.  `vocabulary[i]` spells token id i; ids are int64 tensors (N,)."""

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

    def fingerprint(self):
        """Return a short hexadecimal number that differs from one text to another: of its vocabulary and its tokens."""
        digest = hashlib.blake2b("\0".join(self.vocabulary).encode(), digest_size=8)
        digest.update(self.train.numpy().tobytes())
        digest.update(self.heldout.numpy().tobytes())
        return digest.hexdigest()

    def figures(self):
        """Return what a summary says of it."""
        floors = {"floor_perplexity": self.floor, "bigram_floor_perplexity": self.bigram_floor}
        return floors | {"vocabulary": len(self.vocabulary)}

    def spell(self, ids):
        """Turn token ids back into text."""
        words = ("\n" if self.vocabulary[i] == END_OF_LINE else self.vocabulary[i] for i in ids)
        return self.separator.join(words)


def generated_corpus(num_tokens, length, seed):
    """Return a Corpus of `length` tokens from a source that `seed` determines; the last tenth is held out."""
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


def corpus_from_file(path, tokens):
    """Read a UTF-8 text; `tokens` is "char" or "word".  Raises PermanentError, in one line, for what is not a text."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise PermanentError(f"--corpus {path}: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")  # a byte order mark is not a letter
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is {data[error.start]:#04x}"
        raise PermanentError(f"--corpus {path}: not a UTF-8 text ({where})") from None
    if "\0" in text:
        raise PermanentError(f"--corpus {path}: not a text (it contains zero bytes)")
    if not text.strip():
        raise PermanentError(f"--corpus {path}: there is no text in it")
    if tokens == "char":
        units = list(text)
    else:  # the recipe's way: words between white space, and a token of its own for the end of a line
        units = [word for line in text.splitlines() for word in (*line.split(), END_OF_LINE)]

    train, heldout = _hold_out_the_end(units)
    # The vocabulary is the training part's: a model that knew the held-out part's words would have seen the answers.
    # In word mode a word must occur twice.  The others become <unk>, so that <unk> is seen, and learned, in training.
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


def streams(ids, num_streams):
    """Cut a text (N,) into `num_streams` pieces that are read side by side; return (N // B, B), a stream per column.

    What does not fill the last row is left out.  Source: the word-language-model recipe, batchify.
    """
    steps = len(ids) // num_streams
    return ids[: steps * num_streams].view(num_streams, steps).t().contiguous()


def get_next_batch(stream_SB, bptt):
    """Yield (data (T, B), target (T, B)) down the streams (S, B); the target is the data one step later.

    Consecutive batches continue each other, so the hidden state carries over.  The last one may have fewer steps.
    """
    for start in range(0, len(stream_SB) - 1, bptt):
        steps = min(bptt, len(stream_SB) - 1 - start)
        yield stream_SB[start : start + steps], stream_SB[start + 1 : start + 1 + steps]


def training_streams(corpus, batch_size, bptt):
    """Return (train (., B), held-out (., B')) streams.

    Raises PermanentError if there is too little text for one batch.
    """
    needed = batch_size * (bptt + 1)
    if len(corpus.train) < needed:
        raise PermanentError(
            f"{corpus.name}: {len(corpus.train)} tokens to train on are less than one batch, "
            f"{needed} = --batch_size {batch_size} x (--bptt {bptt} + 1)"
        )
    eval_batch_size = min(EVAL_BATCH_SIZE, len(corpus.heldout) // 2)
    if eval_batch_size == 0:
        raise PermanentError(f"{corpus.name}: too short to hold out a tenth of it")
    return streams(corpus.train, batch_size), streams(corpus.heldout, eval_batch_size)
