"""The text to learn: a file of yours, or a generated text whose entropy rate is known exactly.

Runs in the trainer process only. Of the text, the servers get only token ids.

Shapes: T = time steps of a batch (--bptt), B = streams (--batch_size), S = tokens of a stream, N = tokens of a text.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass

from glue import UserError
from glue.training import seed_for

import torch

from markov_source import MarkovSource

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
EVAL_BATCH_SIZE = 10  # as in the word language model of pytorch/examples


@dataclass
class Corpus:
    """A text as token ids. `train` and `heldout` are int64 tensors (N,); `vocabulary[i]` is the token with id i."""

    name: str
    vocabulary: list
    train: torch.Tensor
    heldout: torch.Tensor
    separator: str  # between two tokens when ids are turned back into text
    floor: float | None = None  # the lowest possible perplexity; None for a text from a file
    bigram_floor: float | None = None  # the same for a model that uses only the last token

    def fingerprint(self):
        """Return a hash of the vocabulary and the tokens, 16 hexadecimal digits."""
        digest = hashlib.blake2b("\0".join(self.vocabulary).encode(), digest_size=8)
        digest.update(self.train.numpy().tobytes())
        digest.update(self.heldout.numpy().tobytes())
        return digest.hexdigest()

    def spell(self, ids):
        """Return the text of a list of token ids."""
        words = ("\n" if self.vocabulary[i] == END_OF_LINE else self.vocabulary[i] for i in ids)
        return self.separator.join(words)


def generated_corpus(num_tokens, length, seed):
    """Return a Corpus of `length` tokens from a random source. `seed` determines both. The last tenth is held out."""
    source = MarkovSource(num_tokens, seed_for(seed, "source"))
    ids = source.sample(length, seed_for(seed, "sample"))
    train, heldout = _hold_out_the_end(ids)
    return Corpus(
        name=f"a generated source of {num_tokens} words",
        vocabulary=[f"w{i}" for i in range(num_tokens)],
        train=train,
        heldout=heldout,
        separator=" ",
        floor=source.floor_perplexity(),
        bigram_floor=source.bigram_floor_perplexity(),
    )


def corpus_from_file(path, tokens):
    """Return a UTF-8 file as a Corpus. `tokens` is "char" or "word".

    Raises UserError, with a text of one line, if the file cannot be read or is not a text.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:  # -sig: without a byte order mark
            text = file.read()
    except OSError as error:
        raise UserError(f"--corpus {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--corpus {path}: not a UTF-8 text ({error.reason}, byte {error.start})") from None
    if "\0" in text or not text.strip():
        raise UserError(f"--corpus {path}: there is no text in it, or it contains zero bytes")
    if tokens == "char":
        units = list(text)
    else:  # as in the word language model: words between white space, and a token for the end of each line
        units = [word for line in text.splitlines() for word in (*line.split(), END_OF_LINE)]

    train, heldout = _hold_out_the_end(units)
    # The vocabulary has only tokens of the training part. With those of the held-out part, the evaluation would use
    # information about the text that the model must predict.
    # A word must occur twice in the training part. All other words become <unk>, so <unk> occurs in training too.
    at_least = 2 if tokens == "word" else 1
    known = [unit for unit, count in Counter(train).most_common() if count >= at_least]
    vocabulary = [UNKNOWN] + [unit for unit in known if unit != UNKNOWN]
    number = {unit: i for i, unit in enumerate(vocabulary)}

    def encode(units):
        return torch.tensor([number.get(unit, 0) for unit in units])

    return Corpus(
        name=f"{path} by {tokens}",
        vocabulary=vocabulary,
        train=encode(train),
        heldout=encode(heldout),
        separator="" if tokens == "char" else " ",
    )


def _hold_out_the_end(sequence):
    cut = len(sequence) - len(sequence) // 10
    return sequence[:cut], sequence[cut:]


def streams(ids, num_streams):
    """Cut a text (N,) into `num_streams` parts of equal length, and return them as the columns of a tensor (S, B).

    S is N // B. The tokens at the end of the text that do not fill a row are left out.
    Source: batchify in the word language model of pytorch/examples.
    """
    steps = len(ids) // num_streams
    return ids[: steps * num_streams].view(num_streams, steps).t().contiguous()


def get_next_batch(stream_SB, bptt):
    """Yield pairs (data, target), each (T, B), from streams (S, B). The target of a token is the next token.

    A batch begins where the batch before it has ended, so it can continue from its hidden state. The last batch may
    have fewer than T time steps.
    """
    for start in range(0, len(stream_SB) - 1, bptt):
        steps = min(bptt, len(stream_SB) - 1 - start)
        yield stream_SB[start : start + steps], stream_SB[start + 1 : start + 1 + steps]


def training_streams(corpus, batch_size, bptt):
    """Return the streams of the training part (S, B) and those of the held-out part (S', B').

    B' is at most EVAL_BATCH_SIZE. Raises UserError if the text is too short for one batch.
    """
    needed = batch_size * (bptt + 1)
    eval_batch_size = min(EVAL_BATCH_SIZE, len(corpus.heldout) // 2)
    if len(corpus.train) < needed or eval_batch_size == 0:
        raise UserError(
            f"{corpus.name}: {len(corpus.train)} tokens to train on are less than one batch, "
            f"{needed} = --batch_size {batch_size} x (--bptt {bptt} + 1), or too few to hold out a tenth"
        )
    return streams(corpus.train, batch_size), streams(corpus.heldout, eval_batch_size)
