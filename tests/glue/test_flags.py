"""The flags that all packages share (flags.py)."""

import pytest
import torch

from helpers import PACKAGES, assert_refused, package_on_path, run_main


def test_flags_are_understood_with_hyphens_too():
    with package_on_path("ddp_rpc"):
        import main

        args = main.parse_args(["--world-size=5", "--num-trainers", "3", "--no-sparse", "--rpc_timeout", "5"])
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
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(flags, words, capsys):
    assert_refused("rl_rpc", flags, capsys, *words, "--help")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_gpu_that_is_not_there_is_refused(package, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(package, ["--device", "cuda"], capsys, "--device cuda", "torch sees no CUDA GPU")


def test_the_whole_command_ends_with_status_2_and_one_line():
    done = run_main("rl_rpc", "--world_size", "1")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
