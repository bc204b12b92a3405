"""The flags that all packages share (flags.py)."""

import importlib.util
import os

import pytest
import torch

from helpers import PACKAGES, assert_refused, package_on_path, run_main


def test_flags_are_understood_with_hyphens_too():
    with package_on_path("ddp_rpc"):
        import main

        args = main.parse_args(["--world-size=5", "--num-trainers", "3", "--no-sparse", "--rpc_timeout", "5"])
        assert main.parse_args(["--mode", "pipelined", "--no_sparse"]).sparse is False
    assert (args.world_size, args.num_trainers, args.sparse, args.rpc_timeout) == (5, 3, False, 5)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--world_sise", "3"], ["unrecognized arguments", "--world_sise"]),
        (["--mode", "none"], ["--mode", "invalid choice"]),
        (["--seed", "-1"], ["--seed", "not a non-negative integer"]),
        (["--world_size", "1"], ["--world_size 1 does not fit"]),
        (["--rank", "5"], ["--rank 5 is out of range"]),
        (["--rank", "0", "--max_restarts", "1"], ["--max_restarts", "torchrun --max-restarts"]),
        (["--resume"], ["--resume needs --checkpoint FILE"]),
        (["--plot", "/no/such/folder/x.png"], ["--plot", "does not exist"]),
        (["--checkpoint", "/"], ["--checkpoint", "a folder"]),
        (["--save", "/"], ["--save", "a folder"]),
        (["--save", "/no/such/folder/policy.pt"], ["--save", "does not exist"]),
        (["--max_episodes", "abc"], ["--max_episodes", "'abc' is not a positive integer"]),
        (["--master_addr", "0.0.0.0"], ["--master_addr", "0.0.0.0"]),
        (["--master_addr", "::1"], ["--master_addr", "::1 is an IPv6 address"]),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(flags, words, capsys):
    assert_refused("rl_rpc", flags, capsys, *words, "--help")


@pytest.mark.parametrize("flag", ["--plot", "--trace", "--checkpoint", "--summary_json", "--save"])
def test_a_folder_without_permission_is_refused(flag, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda folder, mode: False)  # root may write everywhere
    assert_refused("rl_rpc", [flag, tmp_path / "x.png"], capsys, flag, "no permission to write to that folder")


def test_a_path_is_refused_only_by_the_rank_that_writes_it(capsys):
    flags = ["--world_size", 2, "--checkpoint", "/no/such/folder/c.pt"]
    assert_refused("rl_rpc", [*flags, "--rank", 0], capsys, "--checkpoint", "does not exist")
    assert_refused("rnn_rpc", [*flags, "--rank", 1], capsys, "--checkpoint", "does not exist")
    for package, rank in (("rl_rpc", 1), ("rnn_rpc", 0)):
        with package_on_path(package):
            import main

            assert main.parse_args([*map(str, flags), "--rank", str(rank)]).rank == rank


@pytest.mark.parametrize(
    "flag, library", [("--plot", "matplotlib"), ("--trace", "matplotlib"), ("--logdir", "tensorboard")]
)
def test_a_missing_library_is_noticed_before_the_training(flag, library, tmp_path, capsys, monkeypatch):
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else plain(name))
    assert_refused("rl_rpc", [flag, tmp_path / "x.png"], capsys, flag, f"needs {library}, which is not installed")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_gpu_that_is_not_there_is_refused(package, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(package, ["--device", "cuda"], capsys, "--device cuda", "torch sees no CUDA GPU")


def test_the_whole_command_ends_with_status_2_and_one_line():
    done = run_main("rl_rpc", "--world_size", "1")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
