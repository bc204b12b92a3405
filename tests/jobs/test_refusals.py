"""Command lines that cannot work: each is refused with status 2 and one line that says what to change."""

import os
import re
import shlex
import sys

import pytest
import torch

from helpers import ROOT, assert_refused, load_module, package_on_path, parse_args
from programs import Program

pytestmark = pytest.mark.quick

# {program: {flags: what the line says, where "…" stands for any text}}
REFUSED = {
    "rl_rpc/main.py": {
        "--world_sise 3": "unrecognized arguments: --world_sise",
        "--mode none": "--mode: invalid choice",
        "--seed -1": "--seed: '-1' is not a seed",
        "--seed 18446744073709551616": "--seed…is not a seed",
        "--rpc_timeout 3000000": "--rpc_timeout: '3000000' is not a number of seconds",
        "--rpc_timeout 0.001": "--rpc_timeout…is not a number of seconds",
        "--world_size 1": "--world_size 1 does not fit",
        "--rank 3 --world_size 3": "--rank 3: a job of --world_size 3 has no such rank",
        "--master_port 123456": "--master_port",
        "--gamma 1.5": "--gamma",
        "--lr 0": "--lr",
        "--lr x": "argument --lr: 'x' is not a positive number",
        "--resume": "--resume needs --checkpoint FILE",
        "--checkpoint /": "--checkpoint /…cannot write",
        "--rank 0 --save /nonexist/p.pt": "--save /nonexist/p.pt…cannot write",
        "--master_addr 0.0.0.0": "--master_addr: '0.0.0.0'…reach rank 0",
        "--rank 1 --master_addr ::1": "--master_addr: '::1'…IPv4",
        # The next one would be ignored without --rank, and the last one in this mode.
        "--master_addr 10.0.0.1": "--master_addr 10.0.0.1…--rank",
        "--mode packed --on_lost continue": "--on_lost continue…rollout, async",
    },
    "rnn_rpc/main.py": {
        "--world_size 1": "it must be 2 to 3",
        "--world_size 4": "it must be 2 to 3",
        "--vocabulary 1": "nothing to learn",
        "--dropout 1": "not a fraction",
        "--bptt 0": "not a positive integer",
        "--epochs abc": "argument --epochs: 'abc' is not a positive integer",
        "--clip -1": "not a non-negative number",
        "--tokens char": "--tokens char…--corpus",
        "--corpus text --vocabulary 9": "--vocabulary…generated text…--corpus",
        "--corpus text --corpus_tokens 9": "--corpus_tokens…generated text…--corpus",
        "--on_lost continue": "--on_lost continue…not for this package",
    },
    "ddp_rpc/main.py": {
        "--world_size 2": "--world_size 2…1 master",
        "--num_servers 3": "--world_size 4…at least 5…--num_servers",
        "--num_servers 0": "--num_servers…0",
        "--num_servers 11 --num_embeddings 10": "--num_servers 11…--num_embeddings",
        "--lr 0": "--lr…0",
        "--summary_json /nonexist/s.json": "--summary_json…cannot write",
    },
    "param_server/main.py": {
        "--num_gpus 3": "--num_gpus",  # difference 7: the tutorial's check lets 3 through
        "--mode replica --num_gpus 1": "--num_gpus…remote",
        "--device cuda --num_gpus 0": "--num_gpus 0 and --device cuda",
        "--world_size 1": "--world_size 1…trainer",
        "--mode sharded --num_servers 3 --world_size 3": "--world_size 3…at least 4…trainer",
        "--num_servers 2": "--num_servers…--mode sharded",
        "--mode replica --max_staleness 2": "--max_staleness…bounded",
        "--on_lost continue": "--on_lost continue is for the modes replica, bounded, sync, overlap (",
        "--lr -1": "--lr",
        "--batch_size 0": "--batch_size",
        "0 0": "unrecognized arguments: 0 0",  # difference 6: --rank and --num_gpus are flags
    },
    "rl_rpc/elastic.py": {"": "--rank"},
}
# The line names the last flag.
SIZES = "--world_size 1, --world_size 2 --rank 2, --world_size 3 --rank -1"
IN_ONE_FILE = {
    "docs/primer.py": "--plot curve.png, --checkpoint c.pt, --resume, --world_size 1, --rank 2, --lr 0",
    "rl_rpc/tutorial.py": f"{SIZES}, --max_episodes 0, --log_interval 0",
    "rl_rpc/tutorial_batch.py": f"{SIZES}, --num_episode 0, --no_batch",
    "rl_rpc/elastic.py": "--rank -1, --rank 0 --seconds 0",
    "rnn_rpc/tutorial.py": "--world_size 1, --world_size 3, --rank 2, --rank -1",
    "ddp_rpc/tutorial.py": "--world_size 2, --world_size many, --rank 4, --rank -1, --num_gpus -1",
    "param_server/tutorial.py": f"{SIZES}, --world_size 0, --rank 4, --num_gpus 3, --num_gpus -1, --dataset other",
    "param_server/tutorial_batch.py": "--world_size 1, --rank 6, --rank -1, --num_batches 0",
}
for program, lines in IN_ONE_FILE.items():
    REFUSED[program] = REFUSED.get(program, {}) | {
        flags: re.findall(r"--\w+", flags)[-1] for flags in lines.split(", ")
    }


@pytest.mark.parametrize("program, flags", [(program, flags) for program in REFUSED for flags in REFUSED[program]])
def test_a_wrong_command_line_is_refused_in_one_line(program, flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, *shlex.split(flags)])
    with package_on_path(program.partition("/")[0]), pytest.raises(SystemExit) as refused:
        load_module(ROOT / program).parse_args()
    *usage, complaint = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2
    assert re.search(".*".join(map(re.escape, REFUSED[program][flags].split("…"))), complaint), complaint
    assert all(line.startswith(("usage: ", " ")) for line in usage)  # argparse prints it in the programs in one file
    assert not program.endswith("main.py") or (not usage and "--help" in complaint)


def test_the_whole_command_ends_with_status_2_and_one_line(tmp_path):
    """Here for a folder in which this user may not write."""
    tmp_path.chmod(0o555)
    # root may write anyway, unless it gives up its capabilities
    as_user = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    with Program("rl_rpc/main.py", "--save", tmp_path / "p.pt", by=[*as_user, sys.executable]) as done:
        assert (done.wait(), done.output()) == (2, "")
        (line,) = done.errors().splitlines()
        assert f"--save {tmp_path}/p.pt: this user cannot write" in line


def test_a_gpu_that_is_not_there_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused("rl_rpc", ["--device", "cuda"], capsys, "--device cuda", "torch sees no CUDA GPU")


def test_a_rank_is_not_refused_for_what_only_another_rank_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for package in ("rnn_rpc", "ddp_rpc"):
        assert parse_args(package, "--rank", 0, "--checkpoint", "/nonexist/c.pt").rank == 0
    assert parse_args("rl_rpc", "--rank", 1, "--device", "cuda").rank == 1


def test_a_checkpoint_that_exists_is_not_overwritten_without_resume(tmp_path, capsys):
    """It is refused before anything is trained, and the file stays as it is."""
    (tmp_path / "c.pt").write_text("of another run")
    assert_refused("ddp_rpc", ["--checkpoint", tmp_path / "c.pt"], capsys, "c.pt: it exists", "--resume")
    assert (tmp_path / "c.pt").read_text() == "of another run"
