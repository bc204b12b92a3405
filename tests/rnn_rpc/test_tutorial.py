"""rnn_rpc/tutorial.py and single.py: they run as commands, and equal the plain training loop of this file."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from helpers import ROOT, package_on_path
from tutorials import copied_alone, run_in_terminals, run_spawned

with package_on_path("rnn_rpc"):
    import single
    import tutorial

TUTORIAL = "rnn_rpc/tutorial.py"
EPOCH = re.compile(r"Training epoch (\d): perplexity ([\d.]+) \(lowest possible ([\d.]+)\)")


class Enough(Exception):
    """Raised instead of the next batch, to end a training loop after a number of updates."""


def trained(module, monkeypatch, updates):
    """Run the module's run_trainer for some updates; return its batches, its model, and its first parameters."""
    batches, models, start = [], [], []

    class Recorded(module.RNNModel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            models.append(self)
            start.extend(parameters_of(self))

    def limited(prob, T, B, nbatches):
        for data, target in original(prob, T, B, nbatches):
            if nbatches > 1:  # the held-out text is one batch
                if len(batches) == updates:
                    raise Enough
                batches.append((data, target))
            yield data, target

    original = module.get_next_batch
    with monkeypatch.context() as patch:
        patch.setattr(module, "RNNModel", Recorded)
        patch.setattr(module, "get_next_batch", limited)
        with pytest.raises(Enough):
            module.run_trainer(seed=3)
    assert len(batches) == updates
    return batches, models[0], start


def parameters_of(model):
    """Return copies of the parameters of the table, the LSTM and the decoder, local or remote."""
    if hasattr(model, "parameter_rrefs"):
        found = [rref.to_here() for rref in model.parameter_rrefs()]
    else:
        found = model.parameters()
    return [parameter.detach().clone() for parameter in found]


def plain_loop(start, batches, published_loss=False):
    """Train nn.Embedding, nn.LSTM and nn.Linear from these parameters on these batches; return the parameters."""
    table, lstm, linear = nn.Embedding(10, 16), nn.LSTM(16, 32), nn.Linear(32, 10)
    parameters = [*table.parameters(), *lstm.parameters(), *linear.parameters()]
    # In nn.Linear and in the tutorial's Decoder, the weight comes before the bias.
    for parameter, value in zip(parameters, start, strict=True):
        parameter.data.copy_(value)
    hidden = (torch.zeros(1, 20, 32), torch.zeros(1, 20, 32))
    for data, target in batches:
        output, hidden = lstm(table(data), tuple(state.detach() for state in hidden))
        scores = linear(output)
        if published_loss:  # the classes are on axis 1, so they are the 20 streams (DIFFERENCES.md, point 4)
            loss = nn.functional.cross_entropy(scores, target[:, :10])
        else:
            loss = nn.functional.cross_entropy(scores.reshape(-1, 10), target.reshape(-1))
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 2.0 * gradient
    return [parameter.detach() for parameter in parameters]


def largest_difference(ones, others):
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


@pytest.mark.filterwarnings("ignore:You are using a Backend")
@pytest.mark.parametrize("updates", [1, 10])
def test_the_tutorial_equals_a_plain_loop(rpc_group, monkeypatch, updates):
    """The server is another process.  With the published loss (point 4 of DIFFERENCES.md), they would not be equal."""
    monkeypatch.setitem(sys.modules, "tutorial", tutorial)  # RPC pickles its classes by their module's name
    batches, model, start = trained(tutorial, monkeypatch, updates)
    assert {rref.owner_name() for rref in model.parameter_rrefs()} == {"ps", "trainer"}
    after = parameters_of(model)
    assert largest_difference(after, plain_loop(start, batches)) < 1e-6
    assert largest_difference(after, start) > 1e-3
    assert largest_difference(after, plain_loop(start, batches, published_loss=True)) > 1e-3


@pytest.mark.filterwarnings("ignore:You are using a Backend")
def test_single_and_tutorial_start_and_stay_the_same(rpc_group, monkeypatch):
    monkeypatch.setitem(sys.modules, "tutorial", tutorial)
    batches, model, start = trained(tutorial, monkeypatch, updates=10)
    single_batches, single_model, single_start = trained(single, monkeypatch, updates=10)
    for pair, single_pair in zip(batches, single_batches, strict=True):
        assert torch.equal(pair[0], single_pair[0]) and torch.equal(pair[1], single_pair[1])
    assert largest_difference(start, single_start) == 0
    assert largest_difference(parameters_of(model), parameters_of(single_model)) < 1e-6


def test_the_lowest_perplexity_is_that_of_the_text():
    """In a long text, the differences from the word before the last have the probabilities that run_trainer uses."""
    torch.manual_seed(1)
    prob = torch.softmax(-torch.arange(10.0), dim=0)
    ((data, target),) = tutorial.get_next_batch(prob, T=10_000, B=20, nbatches=1)
    assert data.shape == target.shape == (10_000, 20) and torch.equal(data[1:], target[:-1])
    jumps = (target[1:] - data[:-1]) % 10
    counted = torch.bincount(jumps.flatten(), minlength=10) / jumps.numel()
    torch.testing.assert_close(counted, prob, rtol=0, atol=0.005)
    # The last word gives no information about the next one: all pairs of words are equally likely.
    pairs = torch.bincount((data * 10 + target).flatten(), minlength=100) / data.numel()
    torch.testing.assert_close(pairs, torch.full((100,), 0.01), rtol=0, atol=0.002)


@pytest.mark.parametrize("flags", [("--world_size", "1"), ("--world_size", "3"), ("--rank", "2"), ("--rank", "-1")])
def test_wrong_world_sizes_and_ranks_are_refused(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tutorial.py", *flags])
    with pytest.raises(SystemExit) as refused:
        tutorial.parse_args()
    assert refused.value.code == 2 and flags[0] in capsys.readouterr().err


def assert_learned(output):
    """Check that there are eight epochs, and that the last perplexity is within 5 % of the lowest possible one."""
    epochs = EPOCH.findall(output)
    assert [epoch for epoch, _, _ in epochs] == list("01234567") and len(output.splitlines()) == 8
    last = float(epochs[-1][1])
    assert {lowest for _, _, lowest in epochs} == {"2.830"} and 2.80 < last < 1.05 * 2.83


@pytest.mark.slow
def test_all_ranks_spawned_from_a_copy_alone(tmp_path):
    done = run_spawned(copied_alone(TUTORIAL, tmp_path), "--seed", 2, cwd=tmp_path, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    assert_learned(done.stdout)


@pytest.mark.slow
def test_a_rank_per_terminal():
    server, trainer = run_in_terminals(TUTORIAL, 2, timeout=280)
    assert (server.returncode, server.stdout, server.stderr) == (0, "", "")
    assert (trainer.returncode, trainer.stderr) == (0, "")
    assert_learned(trainer.stdout)


@pytest.mark.slow
def test_single_learns():
    command = [sys.executable, str(ROOT / "rnn_rpc" / "single.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    assert_learned(done.stdout)
