"""The commands of rnn_rpc: what they print and write, and which flags and files they refuse."""

import json
import math
import os
import re
import signal

import pytest
import torch

from helpers import assert_one_line_error, assert_refused, package_on_path
from programs import run_main, run_script, start_main

with package_on_path("rnn_rpc"):
    import corpus

SMALL = ("--corpus_tokens", 20_000, "--epochs", 2)
EPOCH = re.compile(r"^epoch +(\d+) \| train perplexity ([\d.]+) \| held-out perplexity ([\d.]+)", re.M)


def summary_of(tmp_path, *flags, timeout=120):
    path = tmp_path / "summary.json"
    done = run_main("rnn_rpc", *flags, "--summary_json", path, timeout=timeout)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout, json.loads(path.read_text())


def test_a_run_prints_that_it_learns(tmp_path):
    """Differences 2, 5, 6: the tutorial calls a function that does not exist, prints no loss, and needs a GPU."""
    plot = tmp_path / "curve.png"
    flags = (*SMALL, "--clip", 0, "--log_interval", 13)  # two points of the loss curve in each epoch
    text, summary = summary_of(tmp_path, *flags, "--generate", 15, "--plot", plot)
    epochs = EPOCH.findall(text)
    assert [epoch for epoch, *_ in epochs] == ["1", "2"] and float(epochs[1][2]) < float(epochs[0][2]) < 50
    assert float(epochs[1][2]) == pytest.approx(summary["heldout_perplexity"], abs=1e-3)
    steps, losses = summary["curves"]["loss/train"]
    assert steps == [13, 26, 39, 52]
    for (_, perplexity, _), means in zip(epochs, (losses[:2], losses[2:]), strict=True):
        assert float(perplexity) == pytest.approx(math.exp(sum(means) / 2), rel=0.02)  # the last batch is smaller
    assert f"below a perplexity of {summary['floor_perplexity']:.3f}" in text
    assert re.search(r"^([a-z]{2} ){14}[a-z]{2}$", text, re.M)
    assert summary["scenario"] == "rnn_rpc" and summary["mode"] == "logits" and summary["vocabulary"] == 30
    assert 1 < summary["floor_perplexity"] < summary["bigram_floor_perplexity"] and summary["tokens_per_second"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["of ASCII", "gone"])
@pytest.mark.draw(1)
def test_a_text_that_stdout_cannot_show_does_not_lose_the_result(tmp_path, reader):
    """It is generated at the end. The second reader leaves before, as `main.py | head -3` does."""
    (tmp_path / "text").write_text("été à la mer, hiver à la ville; " * 200)
    flags = ["--corpus", tmp_path / "text", "--epochs", 1, "--generate", 400, "--summary_json", tmp_path / "s.json"]
    if reader == "of ASCII":
        done = run_main("rnn_rpc", *flags, env={"PYTHONIOENCODING": "ascii"}, cold=True)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert "\\xe9" in done.stdout or "\\xe0" in done.stdout, done.stdout
    else:
        reader, writer = os.pipe()
        with start_main("rnn_rpc", *flags, stdout=writer) as process:
            os.close(writer)
            with open(reader) as out:
                assert any(EPOCH.match(line) for line in out)
            assert (process.wait(60), process.errors()) == (128 + signal.SIGPIPE, "")
    assert (tmp_path / "s.json").exists()


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


def test_a_diverging_run_ends_with_one_line(tmp_path):
    """The learning rate is far too large. With three ranks, the line is that of the trainer."""
    flags = ("--world_size", 3, "--mode", "overlap", "--corpus_tokens", 20_000, "--lr", 1000, "--clip", 0)
    done = run_main("rnn_rpc", *flags, "--summary_json", tmp_path / "summary.json")
    assert_one_line_error(done, 1, "rnn_rpc: rank 1 (trainer): step ", "the loss is ", "--lr")
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("layer, parameter", [("rnn", "bias_hh_l0"), ("decoder", "decoder.bias")])
def test_a_checkpoint_of_another_network_is_refused_in_one_line(tmp_path, layer, parameter):
    """The LSTM is in the trainer, the decoder on a server."""
    flags = ("--corpus_tokens", 5_000, "--epochs", 1, "--checkpoint", tmp_path / "c.pt")
    assert run_main("rnn_rpc", *flags).returncode == 0
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    content["state"]["model"][layer][parameter] = torch.zeros(5)
    torch.save(content, tmp_path / "c.pt")
    done = run_main("rnn_rpc", *flags, "--resume")
    assert_one_line_error(done, 1, "cannot go on from", f"size mismatch for {parameter}")


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
@pytest.mark.draw(1, "benches")
def test_bench_runs(tmp_path):
    path = tmp_path / "bench.json"
    done = run_script(
        "bench/rnn_rpc.py", "--vocabularies", 50, "--repeats", 1, "--steps", 8, "--json", path, timeout=280
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["50"]
    assert {"logits", "loss", "overlap", "single process"} < set(rows) and all(
        row["median"] > 0 for row in rows.values()
    )


@pytest.mark.slow
@pytest.mark.draw(2, "learns")
def test_the_default_run_ends_within_five_percent_of_the_floor(tmp_path):
    _, summary = summary_of(tmp_path, "--world_size", 2, timeout=240)
    assert summary["heldout_perplexity"] < 1.05 * summary["floor_perplexity"]
    assert summary["heldout_perplexity"] < summary["bigram_floor_perplexity"]
