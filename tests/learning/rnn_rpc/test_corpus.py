"""The texts of rnn_rpc: the entropy of the generated source is exact, and files are read, split or refused."""

import math

import numpy as np
import pytest
import torch

from helpers import package_on_path

with package_on_path("rnn_rpc"):
    import corpus

pytestmark = pytest.mark.quick


def perplexity_of(counts):
    """Return the perplexity of who knows, in each state, how often each token follows. `counts`: (state, token)."""
    rows = np.broadcast_to(counts.sum(axis=1, keepdims=True), counts.shape)[counts > 0]
    seen = counts[counts > 0]
    return math.exp(-(seen * np.log(seen / rows)).sum() / counts.sum())


def test_floor_is_the_entropy_rate_by_another_way():
    """The other ways are dense linear algebra instead of power iteration, and the transitions in a long sample."""
    source = corpus.MarkovSource(num_tokens=6, seed=3)
    states = 12
    transition = np.zeros((states, states))
    for s in range(states):
        np.add.at(transition[s], source.next_state_SK[s], source.prob_SK[s])
    balance = np.vstack([transition.T - np.eye(states), np.ones(states)])
    pi = np.linalg.lstsq(balance, np.append(np.zeros(states), 1.0), rcond=None)[0]
    np.testing.assert_allclose(source.stationary_S, pi, atol=1e-9)
    floor = math.exp(-sum(pi[s] * p * math.log(p) for s in range(states) for p in source.prob_SK[s]))
    assert source.floor_perplexity() == pytest.approx(floor, rel=1e-9)

    ids = source.sample(200_000, seed=1).numpy()
    counts = np.zeros((states, 6))
    state = (ids[:-2] % 2) * 6 + ids[1:-1]  # parity of the token before the last, and last token
    np.add.at(counts, (state, ids[2:]), 1)
    assert perplexity_of(counts) == pytest.approx(floor, rel=0.01)


def test_remembering_one_token_only_is_not_enough():
    source = corpus.MarkovSource(num_tokens=50, seed=1)
    assert source.floor_perplexity() * 1.3 < source.bigram_floor_perplexity() < 50
    ids = source.sample(300_000, seed=2).numpy()
    counts = np.zeros((50, 50))
    np.add.at(counts, (ids[:-1], ids[1:]), 1)
    assert perplexity_of(counts) == pytest.approx(source.bigram_floor_perplexity(), rel=0.01)


@pytest.mark.parametrize("num_tokens", [2, 3, 8, 10_000])
def test_sources_of_all_sizes(num_tokens):
    source = corpus.MarkovSource(num_tokens, seed=1)
    ids = source.sample(2_000, seed=1)
    assert ids.min() >= 0 and ids.max() < num_tokens
    assert 1 < source.floor_perplexity() <= min(4, num_tokens)
    assert source.floor_perplexity() <= source.bigram_floor_perplexity() + 1e-9


def test_generated_corpus_repeats_and_its_words_differ():
    first, again = (corpus.generated_corpus(300, 5_000, seed=7) for _ in range(2))
    assert torch.equal(first.train, again.train) and torch.equal(first.heldout, again.heldout)
    assert len(set(first.vocabulary)) == 300 and len(first.heldout) == 500
    assert not torch.equal(first.train, corpus.generated_corpus(300, 5_000, seed=8).train)


def test_streams_and_batches_follow_the_recipe():
    """Difference 3: targets are the next tokens, not uninitialised memory. Batches follow each other in the text."""
    stream = corpus.streams(torch.arange(26), 4)
    assert stream.shape == (6, 4) and stream[:, 1].tolist() == [6, 7, 8, 9, 10, 11]
    seen = list(corpus.get_next_batch(stream, bptt=2))
    assert [len(input_TB) for input_TB, _ in seen] == [2, 2, 1]
    for input_TB, targets_TB in seen:
        assert torch.equal(targets_TB, input_TB + 1)
    assert torch.equal(torch.cat([input_TB for input_TB, _ in seen]), stream[:-1])


def test_words_of_a_file(tmp_path):
    """The vocabulary is that of the training part. Rare and unknown words are <unk>, which occurs in training too."""
    path = tmp_path / "text"
    path.write_bytes("\ufeffa b a b\r\nrare ä ä a b\n".encode() * 1 + b"a b a b\n" * 20 + b"a stranger\n" * 5)
    text = corpus.corpus_from_file(str(path), "word")
    assert text.vocabulary[0] == "<unk>" and set(text.vocabulary) == {"<unk>", "<eos>", "a", "b", "ä"}
    assert 0 in text.train and 0 in text.heldout
    assert text.spell(text.train[:6].tolist()) == "a b a b \n <unk>"
    assert text.floor is None


def test_characters_of_a_file(tmp_path):
    path = tmp_path / "text"
    path.write_text("hello\nworld\n" * 9 + "!" * 12)
    text = corpus.corpus_from_file(str(path), "char")
    assert text.spell(text.train[:8].tolist()) == "hello\nwo" and "!" not in text.vocabulary
    assert set(text.heldout[-5:].tolist()) == {0}
