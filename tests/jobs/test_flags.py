"""The flags that all packages share (flags.py)."""

import os
import sys

import pytest
import torch

from helpers import PACKAGES, assert_refused, package_on_path
from programs import Program

pytestmark = pytest.mark.quick


def test_flags_are_understood_with_hyphens_too():
    with package_on_path("param_server"):
        import main

        args = main.parse_args(["--world-size=5", "--max-batches", "2", "--mode", "replica", "--rpc_timeout", "5"])
        dropped = [main.parse_args(words).no_dropout for words in (["--no-dropout"], ["--no_dropout"], [])]
    assert (args.world_size, args.max_batches, args.rpc_timeout) == (5, 2, 5) and dropped == [True, True, False]


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--world_sise", "3"], ["unrecognized arguments", "--world_sise"]),
        (["--mode", "none"], ["--mode", "invalid choice"]),
        (["--seed", "-1"], ["--seed", "'-1' is not a seed"]),
        (["--seed", "18446744073709551616"], ["--seed", "is not a seed"]),
        (["--rpc_timeout", "3000000"], ["--rpc_timeout", "'3000000' is not a number of seconds"]),
        (["--rpc_timeout", "0.001"], ["--rpc_timeout", "is not a number of seconds"]),
        (["--world_size", "1"], ["--world_size 1 does not fit"]),
        (["--master_port", "123456"], ["--master_port"]),
        (["--gamma", "1.5"], ["--gamma"]),
        (["--lr", "0"], ["--lr"]),
        (["--resume"], ["--resume needs --checkpoint FILE"]),
        (["--checkpoint", "/"], ["--checkpoint /", "cannot write"]),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(flags, words, capsys):
    assert_refused("rl_rpc", flags, capsys, *words, "--help")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_gpu_that_is_not_there_is_refused(package, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(package, ["--device", "cuda"], capsys, "--device cuda", "torch sees no CUDA GPU")


def test_the_whole_command_ends_with_status_2_and_one_line(tmp_path):
    """Here for a folder in which this user may not write."""
    tmp_path.chmod(0o555)
    # root may write anyway, unless it gives up its capabilities
    as_user = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    with Program("rl_rpc/main.py", "--save", tmp_path / "p.pt", by=[*as_user, sys.executable]) as done:
        assert (done.wait(), done.output()) == (2, "")
        (line,) = done.errors().splitlines()
        assert f"--save {tmp_path}/p.pt: this user cannot write" in line


@pytest.mark.parametrize(
    "package, flags, words",
    [
        ("rnn_rpc", ["--epochs", "abc"], ["argument --epochs: 'abc' is not a positive integer"]),
        ("rl_rpc", ["--lr", "x"], ["argument --lr: 'x' is not a positive number"]),
        ("rl_rpc", ["--master_addr", "0.0.0.0"], ["--master_addr: '0.0.0.0'", "reach rank 0"]),
        ("rl_rpc", ["--rank", "1", "--master_addr", "::1"], ["--master_addr: '::1'", "IPv4"]),
        ("rl_rpc", ["--rank", "0", "--save", "/nonexist/p.pt"], ["--save /nonexist/p.pt", "cannot write"]),
        ("rnn_rpc", ["--checkpoint", "/nonexist/c.pt"], ["--checkpoint", "cannot write"]),
        ("ddp_rpc", ["--summary_json", "/nonexist/s.json"], ["--summary_json", "cannot write"]),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(package, flags, words, capsys):
    assert_refused(package, flags, capsys, *words)


@pytest.mark.parametrize(
    "package, flags, words",
    [
        ("rl_rpc", ["--master_addr", "10.0.0.1"], ["--master_addr 10.0.0.1", "--rank"]),
        ("rl_rpc", ["--master_port", "1234"], ["--master_port 1234", "--rank"]),
        ("rnn_rpc", ["--tokens", "char"], ["--tokens char", "--corpus"]),
        ("rnn_rpc", ["--corpus", "text", "--vocabulary", "9"], ["--vocabulary", "generated text", "--corpus"]),
        ("rnn_rpc", ["--corpus", "text", "--corpus_tokens", "9"], ["--corpus_tokens", "generated text", "--corpus"]),
        ("param_server", ["--num_servers", "2"], ["--num_servers", "--mode sharded"]),
        ("rl_rpc", ["--mode", "packed", "--on_lost", "continue"], ["--on_lost continue", "rollout, async"]),
        ("rnn_rpc", ["--on_lost", "continue"], ["--on_lost continue", "not for this package"]),
    ],
)
def test_a_flag_that_would_be_ignored_is_refused(package, flags, words, capsys):
    assert_refused(package, flags, capsys, *words)


@pytest.mark.parametrize("package", ["rnn_rpc", "ddp_rpc"])
def test_only_the_rank_that_writes_a_file_needs_its_folder(package):
    with package_on_path(package):
        import main

        assert main.parse_args(["--rank", "0", "--checkpoint", "/nonexist/c.pt"]).rank == 0


def test_a_checkpoint_that_exists_is_not_overwritten_without_resume(tmp_path, capsys):
    """It is refused before anything is trained, and the file stays as it is."""
    (tmp_path / "c.pt").write_text("of another run")
    assert_refused("ddp_rpc", ["--checkpoint", tmp_path / "c.pt"], capsys, "c.pt: it exists", "--resume")
    assert (tmp_path / "c.pt").read_text() == "of another run"
