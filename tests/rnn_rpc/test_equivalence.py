"""rnn_rpc computes what one plain process computes: every loss of 20 iterations, and every parameter after them."""

import glob
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import package_on_path, run_main

with package_on_path("rnn_rpc"):
    import corpus
    import remote_layers
    from glue import seeds

STEPS, V, E, H, LAYERS, T, B = 20, 12, 6, 8, 2, 7, 4
SIZES = (
    "--vocabulary",
    V,
    "--embedding_dim",
    E,
    "--hidden_dim",
    H,
    "--num_layers",
    LAYERS,
    "--bptt",
    T,
    "--batch_size",
    B,
    "--corpus_tokens",
    626,
    "--epochs",
    1,
    "--log_interval",
    1,
)  # 626: 20 batches to train on
SGD = {"optimizer": "sgd", "lr": 5.0, "clip": 0.05}


def one_process(optimizer="sgd", lr=5.0, clip=0.05, dropout=0.0, seed=1):
    """Plain PyTorch, nothing remote; returns (losses, parameters by name)."""
    seeds = {part: seeds.seed_for(seed, part) for part in ("table", "decoder", "rnn")}
    torch.manual_seed(seeds["rnn"])
    rnn = nn.LSTM(E, H, LAYERS, dropout=dropout)
    table, decoder = nn.Embedding(V, E), nn.Linear(H, V)
    for part, weight in (("table", table.weight), ("decoder", decoder.weight)):
        nn.init.uniform_(weight, -0.1, 0.1, torch.Generator().manual_seed(seeds[part]))
    nn.init.zeros_(decoder.bias)
    after_table = remote_layers.KeyedDropout(dropout, seeds["table"])
    before_decoder = remote_layers.KeyedDropout(dropout, seeds["decoder"])
    parameters = [*table.parameters(), *rnn.parameters(), *decoder.parameters()]
    opt = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](parameters, lr=lr)

    text = corpus.generated_corpus(V, 626, seed)
    hidden, losses = (torch.zeros(LAYERS, B, H), torch.zeros(LAYERS, B, H)), []
    for step, (input_TB, targets_TB) in enumerate(corpus.batches(corpus.streams(text.train, B), T)):
        torch.manual_seed(seeds.seed_for(seed, "dropout", step))
        hidden = tuple(state.detach() for state in hidden)
        output, hidden = rnn(after_table(table(input_TB), step), hidden)
        logits_TBV = decoder(before_decoder(output, step))
        loss = F.cross_entropy(logits_TBV.flatten(0, 1), targets_TB.flatten())
        opt.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(parameters, clip)
        opt.step()
        losses.append(loss.item())
    assert len(losses) == STEPS
    named = {
        "table": {"encoder.weight": table.weight},
        "rnn": dict(rnn.named_parameters()),
        "decoder": {f"decoder.{name}": p for name, p in decoder.named_parameters()},
    }
    return losses, {part: {n: p.detach() for n, p in group.items()} for part, group in named.items()}


def distributed(tmp_path, *flags, steps=STEPS):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    checkpoint, logs = tmp_path / "end.pt", tmp_path / "logs"
    done = run_main("rnn_rpc", *SIZES, "--checkpoint", checkpoint, "--logdir", logs, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    (events,) = glob.glob(f"{logs}/events*")
    accumulator = EventAccumulator(events).Reload()
    losses = [event.value for event in accumulator.Scalars("loss/train")]
    assert len(losses) == steps
    return losses, torch.load(checkpoint, weights_only=True)["state"]["model"]


def assert_equal(one, other, tolerance):
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), rtol=0, atol=tolerance)
    for part in ("table", "rnn", "decoder"):
        assert one[1][part].keys() == other[1][part].keys()
        for name, value in one[1][part].items():
            torch.testing.assert_close(value, other[1][part][name], rtol=0, atol=tolerance, msg=f"{part}.{name}")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", ["logits", "loss", "overlap"])
def test_equals_one_process(tmp_path, mode, world_size):
    found = distributed(tmp_path, "--mode", mode, "--world_size", world_size, "--lr", SGD["lr"], "--clip", SGD["clip"])
    assert_equal(found, one_process(**SGD), tolerance=1e-6)


def test_the_global_norm_is_what_clips():
    """The equality above is one of clipped runs: without clipping, or with the LSTM's gradients clipped alone, the
    parameters would differ."""
    clipped, unclipped = one_process(**SGD), one_process(**{**SGD, "clip": 0})
    assert not torch.allclose(clipped[1]["table"]["encoder.weight"], unclipped[1]["table"]["encoder.weight"], atol=1e-3)
    assert clipped[0][0] == pytest.approx(math.log(V), abs=0.1)  # an untrained model gives each word the same chance


@pytest.mark.parametrize("mode", ["logits", pytest.param("loss", marks=pytest.mark.slow)])
def test_dropout_and_adam_equal_one_process(tmp_path, mode):
    """Dropout masks are keyed, so even a run with dropout repeats exactly, on any worker."""
    adam = {"optimizer": "adam", "lr": 0.01, "clip": 0.1, "dropout": 0.3}
    flags = [word for flag, value in adam.items() for word in (f"--{flag}", value)]
    assert_equal(distributed(tmp_path, "--mode", mode, *flags), one_process(**adam), tolerance=1e-6)


@pytest.mark.parametrize("mode", ["logits", *(pytest.param(m, marks=pytest.mark.slow) for m in ("loss", "overlap"))])
def test_resumed_equals_uninterrupted(tmp_path, mode):
    """Stopped after epoch 1 of 2 and resumed: parameters, optimizer state, dropout masks, learning rate all go on."""
    flags = ("--mode", mode, "--optimizer", "adam", "--dropout", 0.3)
    whole = tmp_path / "whole.pt"
    assert run_main("rnn_rpc", *SIZES, *flags, "--epochs", 2, "--checkpoint", whole).returncode == 0
    parts = tmp_path / "parts.pt"
    assert run_main("rnn_rpc", *SIZES, *flags, "--checkpoint", parts).returncode == 0
    done = run_main("rnn_rpc", *SIZES, *flags, "--epochs", 2, "--checkpoint", parts, "--resume")
    assert (done.returncode, done.stderr) == (0, "") and "Going on after epoch 1" in done.stdout
    one, other = (torch.load(path, weights_only=True)["state"] for path in (whole, parts))
    # `overlap` adds two micro-batches' gradients in the order in which they arrive; the rest is the same to the bit.
    tolerance = 1e-6 if mode == "overlap" else 0
    assert_same(one, other, tolerance)


def assert_same(one, other, tolerance):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key], tolerance)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-9 if tolerance == 0 else 1e-5)
    else:
        assert one == other
