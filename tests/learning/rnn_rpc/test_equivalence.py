"""rnn_rpc computes the same as one plain process, and sends as many bytes as its tensors have.

main.run_trainer runs in this process. The servers are the other processes of the group in conftest.py.
"""

import gc
import re

import pytest
import torch
import torch.distributed.rpc as rpc

from helpers import ROOT, load_bench, load_oracle
from programs import run_main

oracle = load_oracle("rnn_rpc")
as_launched, train, distributed, one_process = oracle.as_launched, oracle.train, oracle.distributed, oracle.one_process
corpus, main = oracle.corpus, oracle.main
V, E, H, LAYERS, T, B = oracle.V, oracle.E, oracle.H, oracle.LAYERS, oracle.T, oracle.B
SIZES, SGD, MODES = oracle.SIZES, oracle.SGD, oracle.MODES
pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("ignore:You are using a Backend"),
    pytest.mark.xdist_group("rnn_rpc"),
]
BYTES = load_bench("bytes_per_step")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_equals_one_process(tmp_path, mode, world_size):
    oracle.assert_equals_one_process(tmp_path, mode, world_size)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
@pytest.mark.parametrize("mode", MODES)
def test_equals_one_process_on_the_cpu(tmp_path, mode, monkeypatch):
    """All ranks are on GPUs, without TF32. The tolerance is 1e-4, because a GPU adds in another order for 20 steps."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")

    def run(*flags):
        done = run_main("rnn_rpc", "--device", "cuda", *flags)
        assert (done.returncode, done.stderr) == (0, "")

    found = distributed(tmp_path, "--mode", mode, "--lr", SGD["lr"], "--clip", SGD["clip"], run=run)
    oracle.assert_equal(found, one_process(**SGD), tolerance=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_adam_equals_one_process(tmp_path, mode):
    """Each of three processes has an Adam of its own for its parameters. The learning rate is the default."""
    found = distributed(tmp_path, "--mode", mode, "--world_size", 3, "--optimizer", "adam", "--clip", 0.1)
    oracle.assert_equal(found, one_process("adam", lr=0.005, clip=0.1), tolerance=1e-6)


@pytest.mark.parametrize("mode", ["logits", "overlap"])  # the state of `loss` is that of `overlap`
def test_resumed_equals_uninterrupted(tmp_path, mode, capsys):
    """A run that ends after epoch 1 and is resumed until epoch 2 has the checkpoint of a run of 2 epochs."""
    flags = (*SIZES, "--mode", mode, "--optimizer", "adam")
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    train(*flags, "--epochs", 2, "--checkpoint", whole)
    train(*flags, "--checkpoint", parts)
    train(*flags, "--epochs", 2, "--checkpoint", parts, "--resume")
    assert "Going on after epoch 1" in capsys.readouterr().out
    one, other = (torch.load(path, weights_only=True)["state"] for path in (whole, parts))
    assert one.keys() == other.keys() and one["epoch"] == other["epoch"] == 2
    for each in ("model", "heldout", "optimizers"):
        # `overlap` adds the gradients of two halves in the order of their arrival. The other modes are exact.
        torch.testing.assert_close(one[each], other[each], rtol=0, atol=1e-6 if mode == "overlap" else 0)
    # To resume a finished run is no failure.
    files = ("--checkpoint", parts, "--summary_json", tmp_path / "summary.json")
    summary = train(*flags, "--epochs", 2, *files, "--resume")
    assert re.search(r"^Going on after epoch 2, .*\nNothing is left to do: ", capsys.readouterr().out, re.M)
    assert summary["heldout_perplexity"] == pytest.approx(other["heldout"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--hidden_dim", 9), "--hidden_dim 8, and this run has 9"),
        (("--corpus_tokens", 2_100), "made with text [0-9a-f]{16}, and this run has [0-9a-f]{16}"),
        (("--world_size", 3), "--world_size 2, and this run has 3"),
        (("--optimizer", "adam"), "--optimizer sgd, and this run has adam"),
        (("--seed", 2), "--seed 1, and this run has 2"),
        ((), "server1: cannot go on from .*size mismatch for decoder.bias"),  # another network
    ],
)
def test_foreign_checkpoints_are_refused(tmp_path_factory, flags, words):
    checkpoint = tmp_path_factory.getbasetemp() / "foreign.pt"
    if not checkpoint.exists():
        train(*SIZES, "--checkpoint", checkpoint)
        content = torch.load(checkpoint, weights_only=True)
        content["state"]["model"]["decoder"]["decoder.bias"] = torch.zeros(5)
        torch.save(content, checkpoint)
    with pytest.raises(ValueError) as refused:
        train(*SIZES, "--checkpoint", checkpoint, "--resume", *flags)
    line = oracle.errors.Explained(refused.value).line(["trainer", "ps", "server1"], 0)  # the group of conftest.py
    assert re.search(words, line) and "\n" not in line


def test_a_point_of_the_curve_is_the_mean_loss_per_token_of_its_interval(tmp_path):
    """Twenty steps, of which the last has one token less in each stream. The learning rate is the tutorial's."""
    flags = ("--clip", 0.05, "--log_interval", 5, "--corpus_tokens", 622)
    summary = train(*SIZES, *flags, "--summary_json", tmp_path / "summary.json")
    losses, tokens = one_process(lr=2.0, clip=0.05, corpus_tokens=622)[0], [T] * 19 + [T - 1]
    expected = []
    for first in range(0, 20, 5):
        parts = zip(losses[first : first + 5], tokens[first : first + 5], strict=True)
        expected.append(sum(loss * n for loss, n in parts) / sum(tokens[first : first + 5]))
    steps, points = summary["curves"]["loss/train"]
    assert steps == [5, 10, 15, 20] and points == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("mode", "lr"), [("logits", 1000), ("loss", 1e6)])
def test_divergence_ends_the_run(tmp_path, mode, lr):
    """Difference 16: a loss that is not finite, or far worse than a blind guess, ends the run. No file is written."""
    files = ("--summary_json", tmp_path / "summary.json", "--checkpoint", tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"^step \d+: the (held-out )?loss is [\w.+]+: .* lower --lr$"):
        train(*SIZES, "--mode", mode, "--lr", lr, "--clip", 0, *files)
    assert not list(tmp_path.iterdir())


def test_the_tutorials_sizes_run(tmp_path):
    """Difference 17: the command in docs/differences has 10 epochs of 5 batches, too few to learn anything."""
    flags = "--vocabulary 10 --corpus_tokens 86 --embedding_dim 2 --hidden_dim 3 --num_layers 4 --dropout 0.5"
    flags += " --bptt 5 --batch_size 3 --epochs 10 --lr 0.05 --clip 0"
    assert flags in " ".join((ROOT / "docs" / "differences" / "rnn_rpc.md").read_text().replace("\\\n", "").split())
    summary = train(*flags.split(), "--summary_json", tmp_path / "summary.json")
    assert summary["steps"] == 50 and summary["heldout_perplexity"] == pytest.approx(10, rel=0.2)


# What a training step sends, and what remains in memory after it.


def steps_of(mode, corpus_tokens, vocabulary, *sizes, bptt, batch_size):
    """Train with one server, and yield the number of steps before each step. `sizes`: E, H and the layers."""
    devices = dict.fromkeys(["trainer", "server1"], "cpu")
    module = main.MODES[mode]
    model = module.RNNModel(module.Decoder, ["server1"], vocabulary, *sizes, dropout=0.0, seed=1, devices=devices)
    the_trainer = main.Trainer(model, "sgd", 1.0, clip=0, seed=1)
    text = corpus.streams(corpus.generated_corpus(vocabulary, corpus_tokens, seed=1).train, batch_size)
    hidden = model.init_hidden(batch_size)
    for step, (data_TB, target_TB) in enumerate(corpus.get_next_batch(text, bptt)):
        yield step
        _, hidden = the_trainer.train_step(data_TB, target_TB, hidden)


@pytest.mark.parametrize("mode", MODES)
def test_bytes_on_the_wire_are_what_the_tensors_weigh(mode):
    """Besides the tensors, the messages have at most 3 % and 30 kB. E = H = 200, V = 1,000."""
    counts = []
    for step in steps_of(mode, 3_133, 1000, 200, 200, 1, bptt=35, batch_size=20):
        if step in (0, 3):
            counts.append(BYTES.wire_bytes())
    n = 35 * 20  # tokens in a batch
    computed = 8 * n + 2 * 4 * n * 200 + 2 * 4 * n * 200  # ids; vectors and outputs, and the gradients of both
    computed += 2 * 4 * n * 1000 if mode == "logits" else 8 * n  # scores and their gradients; or target ids
    assert computed < (counts[1] - counts[0]) / 3 < 1.03 * computed + 30_000


REFERENCES = "__import__('torch').distributed.rpc._rref_context_get_debug_info()"
CONTEXTS = "__import__('torch').distributed.autograd._get_debug_info()"
TENSORS = "sum(issubclass(type(thing), __import__('torch').Tensor) for thing in __import__('gc').get_objects())"


@pytest.mark.parametrize("mode", MODES)
def test_a_step_leaves_nothing_behind(mode):
    """In both processes, the numbers of references, autograd contexts and tensors are the same after 3 and 15 steps."""
    asked = (REFERENCES, CONTEXTS, TENSORS)
    gc.collect()  # what other tests have left
    counts = [
        {rank: [rpc.rpc_sync(rank, eval, args=(what,)) for what in asked] for rank in ("trainer", "server1")}
        for step in steps_of(mode, 626, V, E, H, LAYERS, bptt=T, batch_size=B)
        if step in (3, 15)
    ]
    assert counts[0] == counts[1]
    references, contexts, _ = counts[1]["server1"]
    assert int(references["num_owner_rrefs"]) >= 3  # table, decoder, optimizer
    assert contexts["num_autograd_contexts"] == counts[1]["trainer"][1]["num_autograd_contexts"] == 0


def test_a_text_of_yours(tmp_path, capsys):
    path, summary = tmp_path / "book.txt", tmp_path / "summary.json"
    path.write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    flags = ["--corpus", path, "--optimizer", "adam", "--lr", 0.01, "--mode", "loss", "--generate", 30]
    figures = train(*flags, "--summary_json", summary)
    assert figures["heldout_perplexity"] < 3 and figures["floor_perplexity"] is None
    written = capsys.readouterr().out.partition("epoch   6")[2]
    assert "cat" in written or "dog" in written or "sat" in written
