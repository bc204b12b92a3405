"""The commands of rnn_rpc: what they print and write, and which flags and files they refuse."""

import json
import re

import pytest
import torch

from helpers import package_on_path
from programs import run_main

with package_on_path("rnn_rpc"):
    import corpus

EPOCH = re.compile(r"^epoch +(\d+) \| train perplexity ([\d.]+) \| held-out perplexity ([\d.]+)", re.M)


def test_a_run_prints_that_it_learns(tmp_path):
    """Differences 2, 5, 6: the tutorial calls a function that does not exist, prints no loss, and needs a GPU.

    With the default flags, the run ends within five percent of the lowest possible perplexity, below which no model
    can get. A model that uses only the last word cannot do this.
    """
    path = tmp_path / "summary.json"
    done = run_main("rnn_rpc", "--summary_json", path, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    epochs, summary = EPOCH.findall(done.stdout), json.loads(path.read_text())
    assert [int(epoch) for epoch, *_ in epochs] == [*range(1, 7)] and float(epochs[1][2]) < float(epochs[0][2]) < 50
    assert float(epochs[-1][2]) == pytest.approx(summary["heldout_perplexity"], abs=1e-3)
    assert f"below a perplexity of {summary['floor_perplexity']:.3f}" in done.stdout
    assert summary["heldout_perplexity"] < 1.05 * summary["floor_perplexity"]
    assert summary["heldout_perplexity"] < summary["bigram_floor_perplexity"]
    assert summary["scenario"] == "rnn_rpc" and summary["mode"] == "logits" and summary["vocabulary"] == 30
    assert summary["tokens_per_second"] > 0


def test_a_text_of_characters_that_stdout_cannot_show(tmp_path):
    """It is generated at the end, and its characters are escaped."""
    (tmp_path / "text").write_text("été à la mer, hiver à la ville; " * 200)
    flags = ["--corpus", tmp_path / "text", "--tokens", "char", "--optimizer", "adam", "--epochs", 1, "--generate", 400]
    files = ["--summary_json", tmp_path / "s.json", "--checkpoint", tmp_path / "c.pt"]
    done = run_main("rnn_rpc", *flags, *files, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "\\xe9" in done.stdout or "\\xe0" in done.stdout, done.stdout
    assert json.loads((tmp_path / "s.json").read_text())["vocabulary"] == 15  # its 14 characters, and the unknown one
    assert "exp_avg" in str(torch.load(tmp_path / "c.pt", weights_only=True)["state"]["optimizers"])


@pytest.mark.quick
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
