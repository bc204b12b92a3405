"""What the tests of rnn_rpc compare with: the same training in one process, and main.run_trainer in this process.

Its servers are the other processes of the group in conftest.py.
"""

import json
import sys

import pytest
import torch
from torch import nn

from helpers import load_bench, package_on_path

with package_on_path("rnn_rpc"):
    import glue
    from glue import errors, training

    import corpus
    import logits
    import loss
    import main
    import overlap
    import trainer

train_in_one_process = load_bench("rnn_rpc").train_in_one_process
MODES = list(main.MODES)
STEPS, V, E, H, LAYERS, T, B = 20, 12, 6, 8, 2, 7, 4
SIZES = ["--vocabulary", V, "--embedding_dim", E, "--hidden_dim", H, "--num_layers", LAYERS, "--bptt", T]
SIZES += ["--batch_size", B, "--epochs", 1, "--log_interval", 1, "--corpus_tokens", 626]  # 626: 20 training batches
SGD = {"optimizer": "sgd", "lr": 5.0, "clip": 0.05}


@pytest.fixture(scope="module", autouse=True)
def as_launched(rpc_group):
    """Make the modules importable by their names, as in a rank that glue/launch.py has started."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (glue, logits, loss, trainer):  # RPC pickles classes by their module's name
            patch.setitem(sys.modules, module.__name__, module)
        yield


def train(*flags):
    """Run main.run_trainer with these flags; with --summary_json, return the summary."""
    args = main.parse_args([str(flag) for flag in flags])
    main.run_trainer(args, dict.fromkeys(main.scenario(args).workers, "cpu"))
    if args.summary_json:
        with open(args.summary_json) as file:
            return json.load(file, parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def one_process(optimizer="sgd", lr=5.0, clip=0.05, seed=1, corpus_tokens=626):
    """Train the same model in this process without RPC; return (losses, parameters by name)."""
    own = {part: training.seed_for(seed, part) for part in ("table", "decoder", "rnn")}
    torch.manual_seed(own["rnn"])
    rnn = nn.LSTM(E, H, LAYERS)
    table, decoder = nn.Embedding(V, E), nn.Linear(H, V)
    for part, weight in (("table", table.weight), ("decoder", decoder.weight)):
        nn.init.uniform_(weight, -0.1, 0.1, torch.Generator().manual_seed(own[part]))
    nn.init.zeros_(decoder.bias)
    parameters = [*table.parameters(), *rnn.parameters(), *decoder.parameters()]
    opt = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](parameters, lr=lr)

    batches = corpus.get_next_batch(corpus.streams(corpus.generated_corpus(V, corpus_tokens, seed).train, B), T)
    losses = list(train_in_one_process(table, rnn, decoder, opt, batches, clip))
    assert len(losses) == STEPS
    named = {
        "table": {"encoder.weight": table.weight},
        "rnn": dict(rnn.named_parameters()),
        "decoder": {f"decoder.{name}": p for name, p in decoder.named_parameters()},
    }
    return losses, {part: {n: p.detach() for n, p in group.items()} for part, group in named.items()}


def distributed(tmp_path, *flags, run=train):
    checkpoint, summary = tmp_path / "end.pt", tmp_path / "summary.json"
    run(*SIZES, "--checkpoint", checkpoint, "--summary_json", summary, *flags)
    _, losses = json.loads(summary.read_text())["curves"]["loss/train"]
    assert len(losses) == STEPS
    return losses, torch.load(checkpoint, weights_only=True)["state"]["model"]


def assert_equal(one, other, tolerance):
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), rtol=0, atol=tolerance)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=tolerance)  # of each part by name


def assert_equals_one_process(folder, mode, world_size):
    """Assert that the losses of 20 training steps are equal, and all parameters after them."""
    found = distributed(folder, "--mode", mode, "--world_size", world_size, "--lr", SGD["lr"], "--clip", SGD["clip"])
    assert_equal(found, one_process(**SGD), tolerance=1e-6)
