"""rnn_rpc as a user meets it: commands, what they print and write, and what they refuse."""

import itertools
import json
import re

import pytest
import torch

from helpers import assert_refused, package_on_path, run_main, run_script

with package_on_path("rnn_rpc"):
    import bench
    import corpus

SMALL = ("--corpus_tokens", 20_000, "--epochs", 2)
EPOCH = re.compile(r"^epoch +(\d+) \| lr ([\d.e-]+) \| train perplexity ([\d.]+) \| held-out perplexity ([\d.]+)", re.M)


def summary_of(tmp_path, *flags, timeout=120):
    path = tmp_path / "summary.json"
    done = run_main("rnn_rpc", *flags, "--summary_json", path, timeout=timeout)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout, json.loads(path.read_text())


def test_a_run_prints_that_it_learns(tmp_path):
    """Differences 2, 5, 6: the published code calls a function that is not there, prints no loss, and needs a GPU."""
    plot = tmp_path / "curve.png"
    text, summary = summary_of(tmp_path, *SMALL, "--generate", 15, "--plot", plot)
    epochs = EPOCH.findall(text)
    assert [epoch for epoch, *_ in epochs] == ["1", "2"] and float(epochs[1][3]) < float(epochs[0][3]) < 50
    assert float(epochs[1][3]) == pytest.approx(summary["heldout_perplexity"], abs=1e-3)
    assert f"below a perplexity of {summary['floor_perplexity']:.3f}" in text
    assert re.search(r"^([a-z]{2} ){14}[a-z]{2}$", text, re.M)
    assert summary["scenario"] == "rnn_rpc" and summary["mode"] == "logits" and summary["vocabulary"] == 30
    assert 1 < summary["floor_perplexity"] < summary["bigram_floor_perplexity"] and summary["tokens_per_second"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_all_modes_do_the_same_work(tmp_path):
    """Calls per step: look-up and decoder (two in `overlap`), and optimizer steps and clipping at 2 owners."""
    found = {mode: summary_of(tmp_path, *SMALL, "--mode", mode, "--clip", 0)[1] for mode in bench.MODES}
    steps = found["logits"]["steps"]
    assert {mode: summary["rpc_calls"] for mode, summary in found.items()} == {
        "logits": 4 * steps,
        "loss": 4 * steps,
        "overlap": 5 * steps,
    }
    for mode in ("loss", "overlap"):
        assert found[mode]["heldout_perplexity"] == pytest.approx(found["logits"]["heldout_perplexity"], rel=1e-2)


@pytest.mark.parametrize("mode", ["logits", pytest.param("loss", marks=pytest.mark.slow), "overlap"])
def test_bytes_on_the_wire_are_what_the_tensors_weigh(tmp_path, mode):
    """At most 3 % and 30 kB of envelopes, start-up and heartbeats come on top. Here E = H = 200, V = 1,000."""
    flags = ("--transport", "tcp", "--embedding_dim", 200, "--hidden_dim", 200, "--vocabulary", 1000)
    _, summary = summary_of(tmp_path, *flags, "--corpus_tokens", bench.text_length(20), "--epochs", 1, "--mode", mode)
    computed = bench.payload_bytes(mode, 1000)
    assert computed < summary["wire_bytes_per_step"] < 1.03 * computed + 30_000


@pytest.mark.slow
def test_annealing_divides_the_learning_rate_by_four(tmp_path):
    """A learning rate so high that held-out perplexity cannot keep falling."""
    text, _ = summary_of(tmp_path, "--corpus_tokens", 10_000, "--epochs", 8, "--lr", 200, "--clip", 1)
    epochs = [(float(lr), float(heldout)) for _, lr, _, heldout in EPOCH.findall(text)]
    best = float("inf")
    for (lr, heldout), (next_lr, _) in itertools.pairwise(epochs):
        assert next_lr == pytest.approx(lr if heldout < best else lr / 4)
        best = min(best, heldout)
    assert epochs[-1][0] < epochs[0][0]


@pytest.mark.slow
def test_a_text_of_yours(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("the cat sat on the mat and the dog sat on the log\n" * 200)
    for tokens, bound in (("char", 2.0), ("word", 3.0)):
        text, summary = summary_of(
            tmp_path,
            "--corpus",
            path,
            "--tokens",
            tokens,
            "--epochs",
            6,
            "--optimizer",
            "adam",
            "--lr",
            0.01,
            "--generate",
            30,
            "--mode",
            "loss",
        )
        assert summary["heldout_perplexity"] < bound and summary["floor_perplexity"] is None
        assert "cat" in text or "dog" in text or "sat" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "there is no text in it"),
        (b"\x7fELF\x02\xff\xfe\x80\x81" * 50, "not a UTF-8 text"),
        (b"abc\0def" * 50, "zero bytes"),
        (b"too short", "less than one batch"),
        (None, "No such file"),
    ],
)
def test_unusable_texts_are_refused_in_one_line(tmp_path, content, words):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as refused:
        text = corpus.corpus_from_file(str(path), "word")
        corpus.training_streams(text, batch_size=20, bptt=35)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def test_the_user_meets_that_line(tmp_path):
    done = run_main("rnn_rpc", "--corpus", tmp_path)
    line = f"rnn_rpc: rank 1 (trainer): ValueError: --corpus {tmp_path}: Is a directory"
    assert done.returncode == 1 and done.stderr.splitlines()[0] == line and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--world_size", "1"), "it must be 2 to 3"),
        (("--world_size", "4"), "it must be 2 to 3"),
        (("--vocabulary", "1"), "nothing to learn"),
        (("--dropout", "1"), "not a fraction"),
        (("--bptt", "0"), "not a positive integer"),
        (("--clip", "-1"), "not a non-negative number"),
        (("--mode", "sparse"), "invalid choice"),
    ],
)
def test_wrong_command_lines_are_refused(flags, words, capsys):
    assert_refused("rnn_rpc", flags, capsys, words)


@pytest.mark.slow
def test_foreign_checkpoints_are_refused(tmp_path):
    checkpoint = tmp_path / "c.pt"
    flags = ("--corpus_tokens", 4_000, "--epochs", 1, "--checkpoint", checkpoint)
    assert run_main("rnn_rpc", *flags).returncode == 0
    for other, words in (
        (("--hidden_dim", 9), "--hidden_dim 64, not 9"),
        (("--vocabulary", 51), "another vocabulary"),
        (("--world_size", 3), "--world_size 2, not 3"),
        (("--optimizer", "adam"), "--optimizer sgd"),
    ):
        done = run_main("rnn_rpc", *flags, *other, "--resume")
        assert done.returncode == 1 and words in done.stderr.splitlines()[0], done.stderr


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_primer_steps_the_neighbours_tensors(world_size):
    done = run_script("rnn_rpc/primer.py", "--world_size", world_size, "--lr", 0.1)
    assert (done.returncode, done.stderr) == (0, "")
    for rank in range(world_size):
        mine = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith(f"worker{rank}:")]
        assert mine[0] == "rpc_sync  -> 5" and "wait() -> 5" in mine[1] and "to_here() -> 5" in mine[2]
        values = [
            torch.tensor([float(v) for v in line.partition(":  ")[2].split() or line.split()[-3:]])
            for line in mine
            if "first row" in line or "after one step" in line
        ]
        for before, after, gradient in ((values[0], values[1], 1), (values[2], values[3], 2)):
            torch.testing.assert_close(after, before - 0.1 * gradient, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_bench_runs(tmp_path):
    path = tmp_path / "bench.json"
    done = run_script("rnn_rpc/bench.py", "--vocabularies", 50, "--repeats", 1, "--steps", 8, "--json", path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["50"]
    assert set(bench.MODES) < set(rows) and all(row["median"] > 0 for row in rows.values())


@pytest.mark.slow
def test_the_default_run_ends_within_five_percent_of_the_floor(tmp_path):
    _, summary = summary_of(tmp_path, "--world_size", 2, timeout=240)
    assert summary["heldout_perplexity"] < 1.05 * summary["floor_perplexity"]
    assert summary["heldout_perplexity"] < summary["bigram_floor_perplexity"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["logits", "overlap"])
def test_memory_stays_flat(monkeypatch, mode):
    """2,000 iterations of the benchmark, E = H = 64: less than 32 MiB more at the end than after a quarter of them.

    1,500 leaked look-ups of T x B x E floats would be 256 MiB; the allocator alone moves by some 20.
    """
    monkeypatch.setattr(bench, "E", 64)
    monkeypatch.setattr(bench, "H", 64)
    resident = bench.memory(bench.parse_args(["--memory", "--vocabularies", "100", "--mode", mode]))
    assert set(resident) == {"ps", "trainer"}
    for quarter, _, _, end in resident.values():
        assert end - quarter < 32 and quarter > 100, resident
