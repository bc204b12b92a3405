"""Each flag of each main.py has an effect that its user sees.

No other test notices a flag that does not arrive, because the program then works with the default. So each package has
one job with values that are not the defaults, FLAGS. Most of these flags decide what the job computes, which is
compared with one process. ELSEWHERE has the flags whose effects other tests show.
"""

import functools
import json
import re

import pytest
import torch

from helpers import PACKAGES, load_oracle, parse_args
from programs import run_main

FILES = "--summary_json summary.json --checkpoint checkpoint.pt"
FLAGS = {
    "rl_rpc": "--seed 2 --gamma 0.5 --max_episodes 4 --log_interval 2 --eval_episodes 3 --save policy.pt",
    "rnn_rpc": """--world_size 3 --seed 2 --vocabulary 12 --corpus_tokens 626 --embedding_dim 6 --hidden_dim 8
        --num_layers 2 --epochs 1 --batch_size 4 --bptt 7 --lr 5 --clip 0.05 --log_interval 1 --generate 5""",
    "ddp_rpc": """--world_size 4 --num_servers 2 --seed 2 --num_embeddings 50 --embedding_dim 12 --batch_bags 6
        --batches 15 --epochs 2 --log_interval 5""",
    "param_server": """--mode sharded --world_size 4 --num_servers 3 --seed 2 --epochs 2 --max_batches 3 --batch_size 8
        --lr 0.1 --lr_step 1 --momentum 0.9 --no_dropout --log_interval 2 --evaluations 2""",
}
# The glue gives the first ones their effect. Its copies have the same bytes, so a test of one package shows it.
GLUE = "--rank --master_addr --master_port --join_timeout --device --transport --rpc_timeout --check --resume --on_lost"
ELSEWHERE = {
    "rl_rpc": "--world_size --mode --env_id --games --lr --reward_threshold",
    "rnn_rpc": "--mode --corpus --tokens --optimizer --dropout",
    "ddp_rpc": "--mode --lr --targets --sparse --table_device",
    "param_server": "--data_dir --max_staleness --num_gpus --dataset",
}


class Run:
    """What a job has printed and written."""

    def __init__(self, package, folder, data_dir, *more):
        self.folder, self.data_dir = folder, data_dir
        where = ["--data_dir", data_dir] if package == "param_server" else []
        flags = f"{FILES} {FLAGS[package]}".split()
        done = run_main(package, *flags, *where, *more, cwd=folder, timeout=240)
        assert (done.returncode, done.stderr) == (0, ""), done
        self.text = done.stdout
        self.summary = json.loads((folder / "summary.json").read_text())
        self.state = torch.load(folder / "checkpoint.pt", weights_only=True)["state"]

    def curve(self, name):
        return tuple(self.summary["curves"][name])


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, few_digits):
    """Return a function of a package that returns the Run of its job."""
    return functools.cache(lambda package: Run(package, tmp_path_factory.mktemp(package), few_digits))


def jobs_of(*packages):
    """The tests of one package share its job, so they run in one process."""
    for package in packages:
        yield pytest.param(package, marks=pytest.mark.xdist_group(f"flags of {package}"))


def rl_rpc(run):
    rewards, parameters = load_oracle("rl_rpc").single_process_reinforce(seed=2, episodes=4, gamma=0.5)
    torch.testing.assert_close(run.state["policy"], parameters, rtol=0, atol=1e-5)
    assert run.curve("reward/last") == ([1, 2, 3, 4], rewards)
    assert (run.folder / "policy.pt").exists()
    begin, second, fourth, end, greedy = run.text.splitlines()
    assert begin.startswith("This will run until reward threshold of 475.0 is reached")
    for number, line in ((2, second), (4, fourth)):
        assert re.fullmatch(rf"Episode {number}\tLast reward: \d+\.00\tAverage reward: \d+\.\d\d", line)
    assert re.fullmatch(r"Not solved: running reward is \d+\.\d\d after 4 episodes\.", end)
    assert re.fullmatch(r"Greedy policy over 3 episodes: mean reward \d+\.\d\d, lowest \d+\.\d\d", greedy)


def rnn_rpc(run):
    oracle = load_oracle("rnn_rpc")
    expected = oracle.one_process(lr=5.0, clip=0.05, seed=2)
    oracle.assert_equal((run.curve("loss/train")[1], run.state["model"]), expected, tolerance=1e-6)
    assert run.summary["world_size"] == 3
    assert re.search(r"^(w\d+ ){4}w\d+$", run.text, re.M)


def ddp_rpc(run):
    oracle = load_oracle("ddp_rpc")
    found = run.state["table"], run.state["fc"]
    assert oracle.largest_difference(found, oracle.one_process(seed=2)) < 1e-5
    figures = oracle.heldout_figures(*found, seed=2)
    assert {name: run.summary[name] for name in figures} == pytest.approx(figures, abs=5e-4)
    assert (run.summary["num_trainers"], run.summary["num_servers"]) == (1, 2)
    assert run.curve("loss/train")[0] == [5, 10, 15, 20, 25, 30]


def param_server(run):
    oracle = load_oracle("param_server")
    updates = oracle.updates_of_one_process(3, epochs=2)
    losses, weights = oracle.train(updates, run.data_dir, batch_size=8, momentum=0.9, lr=0.1, seed=2)
    oracle.assert_same_weights(run.state["model"], weights, tolerance=1e-5)
    assert run.curve("loss") == ([1, 3, 5], pytest.approx(losses[::2], abs=1e-5))
    assert run.curve("test accuracy")[0] == [2, 3, 5, 6]
    assert run.summary["mode"] == "sharded" and run.summary["images_applied"] == [24, 24]
    assert re.findall(r"^Rank (\d)", run.text, re.M) == ["3"] * 3  # the first rank after the servers


@pytest.mark.quick
@pytest.mark.parametrize("package", [*jobs_of(*PACKAGES)])
def test_every_flag_has_its_effect(package, run_of):
    {"rl_rpc": rl_rpc, "rnn_rpc": rnn_rpc, "ddp_rpc": ddp_rpc, "param_server": param_server}[package](run_of(package))


# What is asked here, test_equivalence.py of rnn_rpc asks without a start.
FIGURES = {"rl_rpc": "running_reward", "ddp_rpc": "heldout_accuracy", "param_server": "test_accuracy"}


@pytest.mark.parametrize("package", [*jobs_of(*FIGURES)])
def test_to_resume_a_finished_run_is_no_failure(package, run_of):
    """It prints that nothing is left to do, and writes the same files as other runs, with the result of before.

    In rl_rpc a run is finished because the environment is solved, too. In ddp_rpc it has trained for longer than asked.
    """
    before = run_of(package).summary[FIGURES[package]]
    more = {"rl_rpc": ["--max_episodes", 100, "--reward_threshold", 1], "ddp_rpc": ["--epochs", 1]}.get(package, [])
    run = Run(package, run_of(package).folder, run_of(package).data_dir, "--resume", *more)
    nothing_left = r"^Going on after .*\nNothing is left to do: the checkpoint is of a finished run\.$"
    assert re.search(nothing_left, run.text, re.M)
    assert run.summary[FIGURES[package]] == pytest.approx(before)
    assert ("Solved!" in run.text) == (package == "rl_rpc")


@pytest.mark.quick
def test_flags_are_understood_with_hyphens_too():
    args = parse_args("param_server", "--world-size=5", "--max-batches", 2, "--mode", "replica", "--rpc_timeout", 5)
    dropped = [parse_args("param_server", *words).no_dropout for words in (["--no-dropout"], ["--no_dropout"], [])]
    assert (args.world_size, args.max_batches, args.rpc_timeout) == (5, 2, 5) and dropped == [True, True, False]


@pytest.mark.quick
@pytest.mark.parametrize("package", PACKAGES)
def test_no_flag_is_forgotten(package, capsys):
    """argparse lists each flag on a line of its own, with other spellings behind it."""
    with pytest.raises(SystemExit):
        parse_args(package, "--help")
    tested = re.findall(r"--\w+", f"{GLUE} {FILES} {FLAGS[package]} {ELSEWHERE[package]}")
    assert sorted(tested) == sorted(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.M))
