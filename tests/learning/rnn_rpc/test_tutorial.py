"""rnn_rpc/tutorial.py and single.py: they run as commands, and equal a plain training loop."""

import re
import sys

import pytest
import torch
from torch import nn

from helpers import ROOT, largest_difference, load_module, load_oracle
from patches import patched
from tutorials import copied_alone, run_in_terminals

TUTORIAL = "rnn_rpc/tutorial.py"
EPOCH = re.compile(r"Training epoch (\d): perplexity ([\d.]+) \(lowest possible ([\d.]+)\)")
V, E, H, T, B = 10, 16, 32, 20, 20  # the constants of run_trainer


class Stop(Exception):
    """It has made enough updates."""


def trained(program, updates, monkeypatch):
    """Let run_trainer make so many updates; return (model, (first parameters, first hidden state), batches)."""
    model, start, batches = [], [], []

    class RNNModel(program.RNNModel):
        def forward(self, data, hidden):
            if not model:
                model.append(self)
                start.extend([parameters_of(self), [state.clone() for state in hidden]])
            if len(batches) == updates:
                raise Stop
            batches.append([data])
            return super().forward(data, hidden)

    class Criterion(nn.CrossEntropyLoss):
        def forward(self, scores, target):
            batches[-1].append(target.view_as(batches[-1][0]))
            return super().forward(scores, target)

    monkeypatch.setattr(program, "RNNModel", RNNModel)
    monkeypatch.setattr(nn, "CrossEntropyLoss", Criterion)
    torch.manual_seed(3)
    with pytest.raises(Stop):
        program.run_trainer()
    return model[0], start, batches


def parameters_of(model):
    """Return copies of the parameters of the table, the LSTM and the decoder, local or remote."""
    if hasattr(model, "parameter_rrefs"):
        found = [rref.rpc_sync().cpu() for rref in model.parameter_rrefs()]
    else:
        found = [parameter.cpu() for parameter in model.parameters()]
    return [parameter.detach().clone() for parameter in found]


def plain_loop(start, hidden, batches):
    """Train from these parameters on these batches in one process; return the parameters."""
    table, lstm, linear = nn.Embedding(V, E), nn.LSTM(E, H), nn.Linear(H, V)
    parameters = [*table.parameters(), *lstm.parameters(), *linear.parameters()]
    # In nn.Linear and in the tutorial's Decoder, the weight comes before the bias.
    for parameter, value in zip(parameters, start, strict=True):
        parameter.data.copy_(value)
    opt = torch.optim.SGD(parameters, lr=2.0)
    for _ in load_oracle("rnn_rpc").train_in_one_process(table, lstm, linear, opt, batches, clip=0, hidden=hidden):
        pass
    return [parameter.detach() for parameter in parameters]


@pytest.mark.quick
@pytest.mark.xdist_group("rnn_rpc")
@pytest.mark.filterwarnings("ignore:You are using a Backend")
@pytest.mark.parametrize("name", ["tutorial", "single"])
def test_a_program_in_one_file_equals_a_plain_loop(rpc_group, monkeypatch, name):
    """The tutorial's server is another process."""
    program = load_module(ROOT / f"rnn_rpc/{name}.py")
    monkeypatch.setitem(sys.modules, name, program)  # RPC pickles its classes by their module's name
    model, (start, hidden), batches = trained(program, 10, monkeypatch)
    if name == "tutorial":
        assert {rref.owner_name() for rref in model.parameter_rrefs()} == {"ps", "trainer"}
    assert {data.shape for data, _ in batches} == {(T, B)}
    assert len(batches) == 10
    table, *_, weight, bias = start
    assert 0.09 < table.abs().max() <= 0.1 and 0.09 < weight.abs().max() <= 0.1 and not bias.any()
    after = parameters_of(model)
    assert largest_difference(after, plain_loop(start, hidden, batches)) < 1e-6
    assert largest_difference(after, start) > 1e-3


@pytest.mark.quick
def test_dropout_is_where_the_tutorial_has_it(monkeypatch):
    """RNNModel drops half of the values by default, in all three layers. run_trainer asks for none."""
    single = load_module(ROOT / "rnn_rpc/single.py")
    model = single.RNNModel(V, E, H, nlayers=2)
    assert [model.emb_table.drop.p, model.rnn.dropout, model.decoder.drop.p] == [0.5] * 3
    assert (model.emb_table(torch.zeros(50, 50, dtype=torch.int64)) == 0).float().mean() == pytest.approx(0.5, abs=0.05)
    model, _, _ = trained(single, 0, monkeypatch)
    assert [model.emb_table.drop.p, model.rnn.dropout, model.decoder.drop.p] == [0.0] * 3


def trains_for_two_epochs(program, builtins):
    program.range = lambda stop: builtins.range(2 if stop == 10 else stop)


def test_a_rank_per_terminal_from_a_copy_alone(tmp_path):
    """Two epochs. It computes what single.py computes, and what that learns in ten epochs is tested below."""
    program = patched(copied_alone(TUTORIAL, tmp_path), trains_for_two_epochs)
    server, trainer = run_in_terminals(program, 2, "--seed", 2)
    assert (server.returncode, server.stdout, server.stderr) == (0, "", "")
    assert (trainer.returncode, trainer.stderr) == (0, "")
    (_, first, _), (_, second, _) = EPOCH.findall(trainer.stdout)
    assert float(second) < float(first) < 10


def test_the_same_without_rpc_learns(run_here):
    """The last perplexity is within 5 % of the lowest possible one, below which no model can get."""
    output = run_here(ROOT / "rnn_rpc" / "single.py")
    epochs = EPOCH.findall(output)
    assert [epoch for epoch, _, _ in epochs] == list("0123456789") and len(output.splitlines()) == 10
    assert {lowest for _, _, lowest in epochs} == {"2.830"} and 2.80 < float(epochs[-1][1]) < 1.05 * 2.83
