"""Each flag of each main.py has an effect that its user sees. SEEN is the table of all of them.

No other test notices a flag that does not arrive, because the program then works with the default. So each package has
one job with values that are not the defaults. A row of the table says what is seen of a flag in this job, or names the
test that shows it with another job.
"""

import json
import re

import pytest
import torch

from helpers import PACKAGES, ROOT, load_oracle, package_on_path
from programs import run_main

# ---------------------------------------------------------- what is seen of a flag: functions of a Run, true or raising


def one_process(run):
    """The job has computed what one process computes from these values."""
    return ONE_PROCESS[run.package](run)


def rl_rpc(run):
    rewards, parameters = load_oracle("rl_rpc").single_process_reinforce(seed=2, episodes=4, gamma=0.5)
    torch.testing.assert_close(run.state["policy"], parameters, rtol=0, atol=1e-5)
    return run.curve("reward/last") == ([1, 2, 3, 4], rewards)


def rnn_rpc(run):
    oracle = load_oracle("rnn_rpc")
    losses, parameters = oracle.one_process(lr=5.0, clip=0.05, seed=2)
    oracle.assert_equal((run.curve("loss/train")[1], run.state["model"]), (losses, parameters), tolerance=1e-6)
    return True


def ddp_rpc(run):
    oracle = load_oracle("ddp_rpc")
    found = run.state["table"], run.state["fc"]
    assert oracle.largest_difference(found, oracle.one_process(seed=2)) < 1e-5
    figures = oracle.heldout_figures(*found, seed=2)
    return {name: run.summary[name] for name in figures} == pytest.approx(figures, abs=5e-4)


def param_server(run):
    oracle = load_oracle("param_server")
    updates = oracle.updates_of_one_process(3, epochs=2)
    losses, weights = oracle.train(updates, run.data_dir, batch_size=8, momentum=0.9, lr=0.1, seed=2)
    oracle.assert_same_weights(run.state["model"], weights, tolerance=1e-5)
    return run.curve("loss")[1] == pytest.approx(losses[::2], abs=1e-5)


ONE_PROCESS = {"rl_rpc": rl_rpc, "rnn_rpc": rnn_rpc, "ddp_rpc": ddp_rpc, "param_server": param_server}


def says(text):
    return lambda run: text in run.text


def exists(name):
    return lambda run: (run.folder / name).exists()


# ----------------------------------------------------------------------------------------------------------- the table

# The glue gives these flags their effect. Its copies have the same bytes in all packages, so one package shows it.
GLUE = {
    "--rank": "test_a_run_in_terminals_is_quiet_listens_on_loopback_only_and_leaves_nothing",
    "--master_addr": "test_two_hosts_work_until_the_link_is_cut",
    "--master_port": "test_a_run_in_terminals_is_quiet_listens_on_loopback_only_and_leaves_nothing",
    "--join_timeout": "test_a_missing_rank_is_named_at_join_timeout_and_what_answers_at_the_port_is_recognised",
    "--device": "test_several_ranks_that_compute",
    "--transport": "test_no_rank_grows_with_its_steps",
    "--rpc_timeout": "test_call_that_takes_too_long_shows_where_it_was_made",
    "--check": "test_check_explains_the_machine_and_times_a_call_between_every_two_ranks",
    "--resume": "test_to_resume_a_finished_run_is_no_failure",
    "--summary_json summary.json": exists("summary.json"),
    "--checkpoint checkpoint.pt": exists("checkpoint.pt"),
}

# {package: {a flag, and its value in the job: what is seen of it, or the test that shows it}}
SEEN = {
    "rl_rpc": GLUE
    | {
        "--world_size": "test_every_mode_is_the_single_process_loop",
        "--mode": "test_a_job_goes_on_without_an_observer",
        "--on_lost": "test_a_job_goes_on_without_an_observer",
        "--env_id": "test_an_episode_may_take_longer_than_the_rpc_timeout",
        "--games": "test_vector_is_a_plain_loop_over_the_same_vector_environments_and_repeats",
        "--lr": "test_training_that_diverges_ends_the_run_in_one_line",
        "--reward_threshold": "test_to_resume_a_finished_run_is_no_failure",
        "--seed 2": one_process,
        "--gamma 0.5": one_process,
        "--max_episodes 4": one_process,
        "--log_interval 2": lambda run: re.findall(r"^Episode (\d+)", run.text, re.M) == ["2", "4"],
        "--eval_episodes 3": says("Greedy policy over 3 episodes"),
        "--save policy.pt": exists("policy.pt"),
    },
    "rnn_rpc": GLUE
    | {
        "--mode": "test_bytes_on_the_wire_are_what_the_tensors_weigh",
        "--on_lost": "test_a_wrong_command_line_is_refused_in_one_line",
        "--corpus": "test_a_text_of_characters_that_stdout_cannot_show",
        "--tokens": "test_a_text_of_characters_that_stdout_cannot_show",
        "--optimizer": "test_a_text_of_characters_that_stdout_cannot_show",
        "--dropout": "test_dropout_is_torchs_own",
        "--world_size 3": lambda run: run.summary["world_size"] == 3,
        "--seed 2": one_process,
        "--vocabulary 12": one_process,
        "--corpus_tokens 626": one_process,
        "--embedding_dim 6": one_process,
        "--hidden_dim 8": one_process,
        "--num_layers 2": one_process,
        "--epochs 1": one_process,
        "--batch_size 4": one_process,
        "--bptt 7": one_process,
        "--lr 5": one_process,
        "--clip 0.05": one_process,
        "--log_interval 1": one_process,
        "--generate 5": lambda run: re.search(r"^([a-z]+ ){4}[a-z]+$", run.text, re.M),
    },
    "ddp_rpc": GLUE
    | {
        "--on_lost": "test_a_wrong_command_line_is_refused_in_one_line",
        "--mode": "test_pipelined_learns_for_longer_than_an_rpc_may_take",
        "--lr": "test_divergence_ends_the_run_in_one_line_and_writes_nothing",
        "--targets": "test_divergence_ends_the_run_in_one_line_and_writes_nothing",
        "--sparse": "test_hogwild_with_one_trainer_equals_one_process",
        "--table_device": "test_only_ranks_that_compute_use_a_gpu",
        "--world_size 4": lambda run: run.summary["num_trainers"] == 1,
        "--num_servers 2": lambda run: run.summary["num_servers"] == 2,
        "--seed 2": one_process,
        "--num_embeddings 50": one_process,
        "--embedding_dim 12": one_process,
        "--batch_bags 6": one_process,
        "--batches 15": one_process,
        "--epochs 2": one_process,
        "--log_interval 5": lambda run: run.curve("loss/train")[0] == [5, 10, 15, 20, 25, 30],
    },
    "param_server": GLUE
    | {
        "--on_lost": "test_a_killed_trainers_batches_go_to_the_others",
        "--data_dir": "test_a_killed_trainers_batches_go_to_the_others",
        "--max_staleness": "test_every_update_of_concurrent_trainers_is_right",
        "--num_gpus": "test_num_gpus_says_which_device",
        "--dataset": "test_no_rank_grows_with_its_steps",
        "--mode sharded": lambda run: run.summary["mode"] == "sharded",
        "--world_size 4": lambda run: re.findall(r"^Rank (\d)", run.text, re.M) == ["3"] * 3,
        "--num_servers 3": lambda run: "Rank 3 training" in run.text,  # the first rank after the servers
        "--seed 2": one_process,
        "--epochs 2": one_process,
        "--max_batches 3": one_process,
        "--batch_size 8": lambda run: one_process(run) and run.summary["images_applied"] == [24, 24],
        "--lr 0.1": one_process,
        "--lr_step 1": one_process,
        "--momentum 0.9": one_process,
        "--no_dropout": one_process,
        "--log_interval 2": one_process,
        "--evaluations 2": lambda run: run.curve("test accuracy")[0] == [2, 3, 5, 6],
    },
}


# ------------------------------------------------------------------------------------------------------------ the jobs


class Run:
    """What a job has printed and written."""

    def __init__(self, package, folder, data_dir, *more):
        self.package, self.folder, self.data_dir = package, folder, data_dir
        self.flags = [word for row, seen in SEEN[package].items() if callable(seen) for word in row.split()]
        self.flags += ["--data_dir", data_dir] if package == "param_server" else []
        done = run_main(package, *self.flags, *more, cwd=folder, timeout=240)
        assert (done.returncode, done.stderr) == (0, ""), done
        self.text = done.stdout
        self.summary = json.loads((folder / "summary.json").read_text())
        self.state = torch.load(folder / "checkpoint.pt", weights_only=True)["state"]

    def curve(self, name):
        return tuple(self.summary["curves"][name])


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, few_digits):
    """Return a function of a package that returns the Run of its job."""
    runs = {}

    def run(package):
        runs[package] = runs.get(package) or Run(package, tmp_path_factory.mktemp(package), few_digits)
        return runs[package]

    return run


def jobs_of(*packages):
    """The tests of one package share its job, so they run in one process."""
    for package in packages:
        yield pytest.param(package, marks=pytest.mark.xdist_group(f"flags of {package}"))


@pytest.mark.quick
@pytest.mark.parametrize("package", [*jobs_of(*PACKAGES)])
def test_every_flag_has_its_effect(package, run_of):
    for row, seen in SEEN[package].items():
        assert not callable(seen) or seen(run_of(package)), f"{row} is not seen in {run_of(package).text}"


@pytest.mark.quick
@pytest.mark.parametrize("package", [*jobs_of("rl_rpc")])
def test_default_command_prints_what_the_tutorial_prints(package, run_of):
    lines = run_of(package).text.splitlines()
    assert lines[0].startswith("This will run until reward threshold of 475.0 is reached")
    assert re.fullmatch(r"Episode 2\tLast reward: \d+\.00\tAverage reward: \d+\.\d\d", lines[1])
    assert re.fullmatch(r"Not solved: running reward is \d+\.\d\d after 4 episodes\.", lines[3])
    assert re.fullmatch(r"Greedy policy over 3 episodes: mean reward \d+\.\d\d, lowest \d+\.\d\d", lines[4])


# What is asked here and below, test_equivalence.py of rnn_rpc asks without a start.
FIGURES = {"rl_rpc": "running_reward", "ddp_rpc": "heldout_accuracy", "param_server": "test_accuracy"}


@pytest.mark.parametrize("package", [*jobs_of(*FIGURES)])
def test_to_resume_a_finished_run_is_no_failure(package, run_of):
    """It prints that nothing is left to do, and writes the same files as other runs, with the result of before.

    In rl_rpc a run is finished because the environment is solved, too. In ddp_rpc it has trained for longer than asked.
    """
    before = run_of(package).summary[FIGURES[package]]
    more = {"rl_rpc": ["--max_episodes", 100, "--reward_threshold", 1], "ddp_rpc": ["--epochs", 1]}.get(package, [])
    run = Run(package, run_of(package).folder, run_of(package).data_dir, "--resume", *more)
    assert re.search(
        r"^Going on after .*\nNothing is left to do: the checkpoint is of a finished run\.$", run.text, re.M
    )
    assert run.summary[FIGURES[package]] == pytest.approx(before)
    assert ("Solved!" in run.text) == (package == "rl_rpc")


@pytest.mark.quick
def test_flags_are_understood_with_hyphens_too():
    with package_on_path("param_server"):
        import main

        args = main.parse_args(["--world-size=5", "--max-batches", "2", "--mode", "replica", "--rpc_timeout", "5"])
        dropped = [main.parse_args(words).no_dropout for words in (["--no-dropout"], ["--no_dropout"], [])]
    assert (args.world_size, args.max_batches, args.rpc_timeout) == (5, 2, 5) and dropped == [True, True, False]


# ------------------------------------------------------------------------------------------------ the table is complete


@pytest.mark.quick
@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_has_every_flag(package, capsys):
    """argparse lists each flag on a line of its own, with other spellings behind it."""
    with package_on_path(package), pytest.raises(SystemExit):
        import main

        main.parse_args(["--help"])
    assert {row.split()[0] for row in SEEN[package]} == {*re.findall(r"^  (--\w+)", capsys.readouterr().out, re.M)}


@pytest.mark.quick
def test_the_tests_that_the_table_names_exist():
    tests = "".join(path.read_text() for path in ROOT.glob("tests/*/**/test_*.py"))
    for name in {seen for rows in SEEN.values() for seen in rows.values() if isinstance(seen, str)}:
        assert f"\ndef {name}(" in tests, name
