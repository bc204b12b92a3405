"""rnn_rpc computes the same as one plain process, and sends as many bytes as its tensors have.

main.run_trainer runs in this process. The servers are the other processes of the group in conftest.py.
"""

import itertools
import json
import math
import statistics
import sys

import pytest
import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn
from torch.distributed.rpc import api

from helpers import ROOT, load_bench, package_on_path, run_main

with package_on_path("rnn_rpc"):
    import corpus
    import logits
    import loss
    import main
    import trainer
    from glue import report, seeds

pytestmark = pytest.mark.filterwarnings("ignore:You are using a Backend")
MODES = list(main.MODES)
BENCH = load_bench("rnn_rpc")
WIRE = load_bench("wire")

STEPS, V, E, H, LAYERS, T, B = 20, 12, 6, 8, 2, 7, 4
SIZES = ["--vocabulary", V, "--embedding_dim", E, "--hidden_dim", H, "--num_layers", LAYERS, "--bptt", T]
SIZES += ["--batch_size", B, "--epochs", 1, "--log_interval", 1, "--corpus_tokens", 626]  # 626: 20 training batches
SGD = {"optimizer": "sgd", "lr": 5.0, "clip": 0.05}


@pytest.fixture(scope="module", autouse=True)
def as_launched(rpc_group):
    """Make the modules importable by their names, as in a rank that glue/launch.py has started."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (logits, loss, trainer):  # RPC pickles classes by their module's name
            patch.setitem(sys.modules, module.__name__, module)
        yield


def train(*flags, device="cpu"):
    """Run main.run_trainer with these flags and all layers on `device`; with --summary_json, return the summary."""
    args = main.parse_args([str(flag) for flag in flags])
    names = [main.worker_name(rank, args) for rank in range(args.world_size)]
    main.run_trainer(args, dict.fromkeys(names, device))
    if args.summary_json:
        with open(args.summary_json) as file:
            return json.load(file, parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def one_process(optimizer="sgd", lr=5.0, clip=0.05, seed=1):
    """Train the same model in this process without RPC; return (losses, parameters by name)."""
    own = {part: seeds.seed_for(seed, part) for part in ("table", "decoder", "rnn")}
    torch.manual_seed(own["rnn"])
    rnn = nn.LSTM(E, H, LAYERS)
    table, decoder = nn.Embedding(V, E), nn.Linear(H, V)
    for part, weight in (("table", table.weight), ("decoder", decoder.weight)):
        nn.init.uniform_(weight, -0.1, 0.1, torch.Generator().manual_seed(own[part]))
    nn.init.zeros_(decoder.bias)
    parameters = [*table.parameters(), *rnn.parameters(), *decoder.parameters()]
    opt = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](parameters, lr=lr)

    text = corpus.generated_corpus(V, 626, seed)
    hidden, losses = (torch.zeros(LAYERS, B, H), torch.zeros(LAYERS, B, H)), []
    for data_TB, target_TB in corpus.get_next_batch(corpus.streams(text.train, B), T):
        output, hidden = rnn(table(data_TB), tuple(state.detach() for state in hidden))
        loss = F.cross_entropy(decoder(output).flatten(0, 1), target_TB.flatten())
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


def distributed(tmp_path, *flags, run=train):
    checkpoint, summary = tmp_path / "end.pt", tmp_path / "summary.json"
    run(*SIZES, "--checkpoint", checkpoint, "--summary_json", summary, *flags)
    _, losses = json.loads(summary.read_text())["curves"]["loss/train"]
    assert len(losses) == STEPS
    return losses, torch.load(checkpoint, weights_only=True)["state"]["model"]


def assert_equal(one, other, tolerance):
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), rtol=0, atol=tolerance)
    for part in ("table", "rnn", "decoder"):
        assert one[1][part].keys() == other[1][part].keys()
        for name, value in one[1][part].items():
            torch.testing.assert_close(value, other[1][part][name], rtol=0, atol=tolerance, msg=f"{part}.{name}")


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_equals_one_process(tmp_path, mode, world_size):
    """The losses of 20 training steps are equal, and so are all parameters after them."""
    found = distributed(tmp_path, "--mode", mode, "--world_size", world_size, "--lr", SGD["lr"], "--clip", SGD["clip"])
    assert_equal(found, one_process(**SGD), tolerance=1e-6)


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
    assert_equal(found, one_process(**SGD), tolerance=1e-4)


def test_the_global_norm_is_what_clips():
    """The runs above are clipped: without clipping, the parameters would differ."""
    clipped, unclipped = one_process(**SGD), one_process(**{**SGD, "clip": 0})
    assert not torch.allclose(clipped[1]["table"]["encoder.weight"], unclipped[1]["table"]["encoder.weight"], atol=1e-3)
    assert clipped[0][0] == pytest.approx(math.log(V), abs=0.1)  # untrained: all words are equally likely


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_adam_equals_one_process(tmp_path, mode, world_size):
    """Each process has an Adam of its own for its parameters."""
    adam = {"optimizer": "adam", "lr": 0.01, "clip": 0.1}
    flags = [word for flag, value in adam.items() for word in (f"--{flag}", value)]
    found = distributed(tmp_path, "--mode", mode, "--world_size", world_size, *flags)
    assert_equal(found, one_process(**adam), tolerance=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_resumed_equals_uninterrupted(tmp_path, mode, capsys):
    """A run that ends after epoch 1 and is resumed until epoch 2 has the checkpoint of a run of 2 epochs."""
    flags = (*SIZES, "--mode", mode, "--optimizer", "adam")
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    train(*flags, "--epochs", 2, "--checkpoint", whole)
    train(*flags, "--checkpoint", parts)
    train(*flags, "--epochs", 2, "--checkpoint", parts, "--resume")
    assert "Going on after epoch 1" in capsys.readouterr().out
    one, other = (torch.load(path, weights_only=True)["state"] for path in (whole, parts))
    # `overlap` adds the gradients of two halves in the order of their arrival. The other modes are exact.
    assert_same(one, other, tolerance=1e-6 if mode == "overlap" else 0)


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--hidden_dim", 9), "--hidden_dim 8, and this run has 9"),
        (("--vocabulary", 51), "made with text [0-9a-f]{16}, and this run has [0-9a-f]{16}"),
        (("--corpus_tokens", 2_100), "made with text [0-9a-f]{16}, and this run has [0-9a-f]{16}"),
        (("--world_size", 3), "--world_size 2, and this run has 3"),
        (("--optimizer", "adam"), "--optimizer sgd, and this run has adam"),
        (("--seed", 2), "--seed 1, and this run has 2"),
    ],
)
def test_foreign_checkpoints_are_refused(tmp_path_factory, flags, words):
    checkpoint = tmp_path_factory.getbasetemp() / "foreign.pt"
    if not checkpoint.exists():
        train(*SIZES, "--checkpoint", checkpoint)
    with pytest.raises(ValueError, match=words):
        train(*SIZES, "--checkpoint", checkpoint, "--resume", *flags)


@pytest.mark.parametrize("lr", [1000, 1e6])
@pytest.mark.parametrize("mode", ["logits", "loss"])
def test_divergence_ends_the_run(tmp_path, mode, lr):
    """Difference 16: a loss that is not finite, or far worse than a blind guess, ends the run. No file is written."""
    files = ("--summary_json", tmp_path / "summary.json", "--checkpoint", tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"^step \d+: the (held-out )?loss is [\w.+]+: .* lower --lr$"):
        train(*SIZES, "--mode", mode, "--lr", lr, "--clip", 0, *files)
    assert not list(tmp_path.iterdir())


def test_the_tutorials_sizes_run(tmp_path):
    """Difference 17: the command in DIFFERENCES.md has 10 epochs of 5 batches, too few to learn anything."""
    flags = "--vocabulary 10 --corpus_tokens 86 --embedding_dim 2 --hidden_dim 3 --num_layers 4 --dropout 0.5"
    flags += " --bptt 5 --batch_size 3 --epochs 10 --lr 0.05 --clip 0"
    assert flags in " ".join((ROOT / "docs" / "differences" / "rnn_rpc.md").read_text().replace("\\\n", "").split())
    summary = train(*flags.split(), "--summary_json", tmp_path / "summary.json")
    assert summary["steps"] == 50 and summary["heldout_perplexity"] == pytest.approx(10, rel=0.2)


# What a training step sends, and what remains in memory after it.


@pytest.mark.parametrize("mode", MODES)
def test_bytes_on_the_wire_are_what_the_tensors_weigh(mode, monkeypatch):
    """Besides the tensors, the messages have at most 3 % and 30 kB. E = H = 200, V = 1,000."""
    flags = ["--transport", "tcp", "--embedding_dim", 200, "--hidden_dim", 200, "--vocabulary", 1000, "--epochs", 1]
    flags += ["--corpus_tokens", BENCH.text_length(20), "--mode", mode]
    computed = BENCH.payload_bytes(mode, 1000)
    monkeypatch.setattr(report.Meter, "step", report.Meter.step)  # restores it after the test
    counted = WIRE.count_steps(report.Meter)
    train(*flags)
    assert len(counted) == 20 and computed < statistics.mean(counted) < 1.03 * computed + 30_000


REFERENCES = "__import__('torch').distributed.rpc._rref_context_get_debug_info()"
CONTEXTS = "__import__('torch').distributed.autograd._get_debug_info()"
TENSORS = "sum(issubclass(type(thing), __import__('torch').Tensor) for thing in __import__('gc').get_objects())"


@pytest.mark.parametrize(("mode", "calls"), [("logits", 3), ("loss", 3), ("overlap", 4)])
def test_a_step_makes_so_many_calls_and_leaves_nothing_behind(mode, calls, monkeypatch):
    """A training step calls the look-up, the decoder (twice in `overlap`), and the server's optimizer.

    The trainer also calls its own optimizer, which is not counted here.

    In both processes, the numbers of references, autograd contexts and tensors are the same after 3 and after 15
    training steps. So there is no leak.
    """
    the_trainer = main.Trainer(
        main.MODES[mode].RNNModel(
            ["server1"], V, E, H, LAYERS, 0.0, seed=1, devices={"trainer": "cpu", "server1": "cpu"}
        ),
        "sgd",
        1.0,
        clip=0,
        seed=1,
    )
    text = corpus.streams(corpus.generated_corpus(V, 626, 1).train, B)
    plain, names = api._enable_rpc_profiler, []  # every call passes this function

    def note_call(should_profile, qualified_name, func, rpc_type, worker):
        if worker.name != "trainer" and not func.__module__.startswith("torch.distributed.rpc.internal"):
            names.append(qualified_name)
        return plain(should_profile, qualified_name, func, rpc_type, worker)

    monkeypatch.setattr(api, "_enable_rpc_profiler", note_call)
    counts, made = [], []
    hidden = the_trainer.model.init_hidden(B)
    for step, (data_TB, target_TB) in enumerate(corpus.get_next_batch(text, T), 1):
        _, hidden = the_trainer.train_step(data_TB, target_TB, hidden)
        made.append(len(names))
        if step in (3, 15):
            asked = (REFERENCES, CONTEXTS, TENSORS)
            counts.append(
                {rank: [rpc.rpc_sync(rank, eval, args=(what,)) for what in asked] for rank in ("trainer", "server1")}
            )
    assert [after - before for before, after in itertools.pairwise(made[3:15])] == [calls] * 11
    assert counts[0] == counts[1]
    references, contexts, _ = counts[1]["server1"]
    assert int(references["num_owner_rrefs"]) >= 3  # table, decoder, optimizer
    assert contexts["num_autograd_contexts"] == counts[1]["trainer"][1]["num_autograd_contexts"] == 0


def test_a_text_of_yours(tmp_path, capsys):
    path = tmp_path / "book.txt"
    path.write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    flags = ["--corpus", path, "--optimizer", "adam", "--lr", 0.01, "--mode", "loss", "--generate", 30]
    for tokens, bound in (("char", 2.0), ("word", 3.0)):
        summary = train(*flags, "--tokens", tokens, "--summary_json", tmp_path / "summary.json")
        assert summary["heldout_perplexity"] < bound and summary["floor_perplexity"] is None
        written = capsys.readouterr().out.partition("epoch   6")[2]
        assert "cat" in written or "dog" in written or "sat" in written
