"""rnn_rpc/tutorial.py and single.py: they run as commands, and equal the plain training loop of this file."""

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from helpers import ROOT, load_module
from tutorials import changed, copied_alone, run_in_terminals

TUTORIAL = "rnn_rpc/tutorial.py"
EPOCH = re.compile(r"Training epoch (\d): perplexity ([\d.]+) \(lowest possible ([\d.]+)\)")
V, E, H, T, B = 10, 16, 32, 20, 20  # the constants of run_trainer


def copy_of(name, folder):
    """Return a copy of the program, as a module whose run_trainer makes some updates only, and returns what it has."""
    program = changed(
        copied_alone(f"rnn_rpc/{name}.py", folder),
        ("def run_trainer():\n", "def run_trainer(updates, parameters_of):\n"),
        (
            "    criterion = torch.nn.CrossEntropyLoss()\n",
            "    criterion = torch.nn.CrossEntropyLoss()\n"
            "    start = parameters_of(model), [state.clone() for state in hidden]\n",
        ),
        ("    for epoch in range(10):\n", "    batches = []\n    for epoch in range(1):\n"),
        (
            "        for data, target in get_next_batch():\n",
            "        for _, (data, target) in zip(range(updates), get_next_batch()):\n"
            "            batches.append((data, target))\n",
        ),
        ("        perplexity = torch.exp(total_loss / 160)\n", "        return model, start, batches\n"),
    )
    return load_module(program)


def trained(module, updates):
    """Return (model, (first parameters, first hidden state), batches)."""
    torch.manual_seed(3)
    return module.run_trainer(updates, parameters_of)


def parameters_of(model):
    """Return copies of the parameters of the table, the LSTM and the decoder, local or remote."""
    if hasattr(model, "parameter_rrefs"):
        found = [rref.rpc_sync().cpu() for rref in model.parameter_rrefs()]
    else:
        found = [parameter.cpu() for parameter in model.parameters()]
    return [parameter.detach().clone() for parameter in found]


def plain_loop(start, hidden, batches, published_loss=False):
    """Train nn.Embedding, nn.LSTM and nn.Linear from these parameters on these batches; return the parameters."""
    table, lstm, linear = nn.Embedding(V, E), nn.LSTM(E, H), nn.Linear(H, V)
    parameters = [*table.parameters(), *lstm.parameters(), *linear.parameters()]
    # In nn.Linear and in the tutorial's Decoder, the weight comes before the bias.
    for parameter, value in zip(parameters, start, strict=True):
        parameter.data.copy_(value)
    for data, target in batches:
        output, hidden = lstm(table(data), tuple(state.detach() for state in hidden))
        scores = linear(output)
        if published_loss:  # the classes are on axis 1, so they are the 20 streams (difference 4)
            loss = nn.functional.cross_entropy(scores, target[:, :V])
        else:
            loss = nn.functional.cross_entropy(scores.reshape(-1, V), target.reshape(-1))
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 2.0 * gradient
    return [parameter.detach() for parameter in parameters]


def largest_difference(ones, others):
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


@pytest.mark.quick
@pytest.mark.xdist_group("rnn_rpc")
@pytest.mark.filterwarnings("ignore:You are using a Backend")
@pytest.mark.parametrize("name", ["tutorial", "single"])
def test_a_program_in_one_file_equals_a_plain_loop(rpc_group, monkeypatch, tmp_path, name):
    """The tutorial's server is another process. With the published loss (difference 4), they would not be equal."""
    module = copy_of(name, tmp_path)
    monkeypatch.setitem(sys.modules, name, module)  # RPC pickles its classes by their module's name
    model, (start, hidden), batches = trained(module, updates=10)
    if name == "tutorial":
        assert {rref.owner_name() for rref in model.parameter_rrefs()} == {"ps", "trainer"}
    assert {data.shape for data, _ in batches} == {(T, B)}
    after = parameters_of(model)
    assert largest_difference(after, plain_loop(start, hidden, batches)) < 1e-6
    assert largest_difference(after, start) > 1e-3
    assert largest_difference(after, plain_loop(start, hidden, batches, published_loss=True)) > 1e-3


@pytest.mark.quick
def test_dropout_is_where_the_tutorial_has_it(tmp_path):
    """RNNModel drops half of the values by default, in all three layers. run_trainer asks for none."""
    single = copy_of("single", tmp_path)
    model = single.RNNModel(V, E, H, nlayers=2)
    assert [model.emb_table.drop.p, model.rnn.dropout, model.decoder.drop.p] == [0.5] * 3
    assert (model.emb_table(torch.zeros(50, 50, dtype=torch.int64)) == 0).float().mean() == pytest.approx(0.5, abs=0.05)
    model, _, _ = trained(single, updates=0)
    assert [model.emb_table.drop.p, model.rnn.dropout, model.decoder.drop.p] == [0.0] * 3


@pytest.mark.quick
def test_the_lowest_perplexity_is_that_of_the_text(tmp_path):
    """The differences from the word before the last have the probabilities that run_trainer uses."""
    _, _, batches = trained(copy_of("single", tmp_path), updates=160)
    assert {(*data.shape, *target.shape) for data, target in batches} == {(T, B, T, B)}
    data, target = (torch.cat(part) for part in zip(*batches, strict=True))
    assert torch.equal(data[1:], target[:-1])  # so a batch begins where the one before has ended
    prob = torch.softmax(-torch.arange(10.0), dim=0)
    jumps = (target[1:] - data[:-1]) % V
    counted = torch.bincount(jumps.flatten(), minlength=V) / jumps.numel()
    torch.testing.assert_close(counted, prob, rtol=0, atol=0.01)
    # The last word gives no information about the next one: all pairs of words are equally likely.
    pairs = torch.bincount((data * V + target).flatten(), minlength=V * V) / data.numel()
    torch.testing.assert_close(pairs, torch.full((V * V,), 0.01), rtol=0, atol=0.003)


def assert_learned(output):
    """Check that there are ten epochs, and that the last perplexity is within 5 % of the lowest possible one."""
    epochs = EPOCH.findall(output)
    assert [epoch for epoch, _, _ in epochs] == list("0123456789") and len(output.splitlines()) == 10
    last = float(epochs[-1][1])
    assert {lowest for _, _, lowest in epochs} == {"2.830"} and 2.80 < last < 1.05 * 2.83


def test_a_rank_per_terminal_from_a_copy_alone(tmp_path):
    """Two epochs. It computes what single.py computes, and what that learns in ten epochs is tested below."""
    program = changed(copied_alone(TUTORIAL, tmp_path), ("for epoch in range(10):", "for epoch in range(2):"))
    server, trainer = run_in_terminals(program, 2, "--seed", 2)
    assert (server.returncode, server.stdout, server.stderr) == (0, "", "")
    assert (trainer.returncode, trainer.stderr) == (0, "")
    (_, first, _), (_, second, _) = EPOCH.findall(trainer.stdout)
    assert float(second) < float(first) < 10


def test_the_same_without_rpc_learns(run_here):
    assert_learned(run_here(ROOT / "rnn_rpc" / "single.py"))


@pytest.mark.quick
def test_the_difference_that_the_readme_shows_is_the_real_one(tmp_path):
    readme = (ROOT / "rnn_rpc" / "README.md").read_text()
    programs = ("single.py", "tutorial.py")
    for name in programs:
        text = (ROOT / "rnn_rpc" / name).read_text()
        (tmp_path / name).write_text(re.search(r"^    for epoch in .*?\n(?=\n\n)", text, re.S | re.M)[0])

    done = subprocess.run(["diff", "-U100", *programs], cwd=tmp_path, capture_output=True, text=True)
    (loop,) = re.findall(r"^```diff\n(.*?)^```", readme, re.S | re.M)
    assert done.stdout.split("\n", 3)[3] == loop
