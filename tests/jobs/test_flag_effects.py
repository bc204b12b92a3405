"""Each flag of each program has an effect that its user sees. EFFECTS is the table of all of them.

No other test notices a flag that does not arrive, because the program then works with the default. So each row says
what a flag changes in a small run of the program, or names the test that shows it. A run of all tests draws 24 of the
rows with a small run; a run of this file takes all.

The programs are those of the packages and of docs/. The programs in bench/ and tools/ are for maintainers, who see
whether their flags work.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import socket
import statistics
import tempfile
from collections.abc import Callable

import pytest
import torch

from helpers import PACKAGES, ROOT, write_noise
from jobs import free_port
from programs import Program, run_script
from tutorials import changed, copied_alone

# ------------------------------------------------------------------------------------------------------- kinds of rows


@dataclasses.dataclass
class ShownBy:
    """This test shows the effect."""

    path: str
    test: str


@dataclasses.dataclass
class Fails:
    """The program fails, and says these words."""

    words: str


@dataclasses.dataclass
class Shows:
    """true_of(a run with the flag, a run without it): what is true only with the flag. `base`: flags of both runs.

    `figure`: what is compared between the two, if it must be the same in a second run without the flag.
    """

    true_of: Callable
    base: str = ""
    figure: Callable | None = None


def equals(figure, value):
    return Shows(lambda new, old: figure(new) == value)


def differs(figure, base=""):
    return Shows(lambda new, old: figure(new) != figure(old), base, figure)


def says(text):
    return Shows(lambda new, old: text in new.text)


def lists(pattern, found):
    """The text contains the pattern so often, with these groups."""
    return Shows(lambda new, old: re.findall(pattern, new.text, re.M) == found)


# What these functions return is a function of a run.


def shape(*names):
    """The shape of a tensor in the checkpoint."""
    return lambda run: tuple(functools.reduce(lambda state, name: state[name], names, run.state).shape)


def summary(name):
    return lambda run: run.summary[name]


def steps_of(name):
    return lambda run: run.summary["curves"][name][0]


def values_of(name):
    return lambda run: run.summary["curves"][name][1]


def text(run):
    return run.text


def episodes(run):
    return re.findall(r"^Episode .*", run.text, re.M)


def losses(run):
    return re.findall(r"[Ll]oss ([\d.]+)", run.text)


# ----------------------------------------------------------------------------------------------------------- the table

THIS_FILE = "tests/jobs/test_flag_effects.py"
PLACE = ShownBy(THIS_FILE, "test_a_rank_goes_where_the_flags_say")
WRITTEN = ShownBy(THIS_FILE, "test_a_flag_has_its_effect")  # it reads this file in all runs of main.py
ELASTIC_LIMIT = ShownBy("tests/jobs/rl_rpc/test_elastic.py", "test_elastic_alone_in_a_folder_ends_at_its_limit")
REPLAY = "test_every_update_of_concurrent_trainers_is_right"
# Flags of the small runs that a row cannot have get their default back, as if they were not given.
NOT_GENERATED = "--corpus_tokens 300000"
NO_FOLDER = "--data_dir data"
MORE_STEPS = Shows(lambda new, old: new.summary["steps"] > 1.5 * old.summary["steps"])

# The glue gives these flags their effect. Its copies have the same bytes in all packages (test_repository.py), so most
# of them are shown with one package: rl_rpc, where the row does not say another.
GLUE = {
    "--world_size": ShownBy("tests/jobs/test_starting.py", "test_check_measures_the_round_trip_of_each_pair"),
    "--rank": PLACE,
    "--master_addr": PLACE,
    "--master_port": PLACE,
    "--join_timeout": ShownBy(
        "tests/jobs/test_starting.py", "test_a_name_that_nobody_knows_is_waited_for_until_join_timeout"
    ),
    "--device auto": says("--device auto: "),  # and what it has chosen; test_cuda.py and test_pretend_device.py use it
    "--transport": ShownBy(THIS_FILE, "test_only_shared_memory_has_sockets_of_its_own"),
    "--max_restarts": ShownBy("tests/jobs/test_starting.py", "test_a_job_that_lost_a_rank_comes_back"),
    "--rpc_timeout": ShownBy("tests/jobs/test_own_errors.py", "test_call_that_takes_too_long_shows_where_it_was_made"),
    "--check": ShownBy("tests/jobs/test_starting.py", "test_check_explains_the_machine"),
    "--summary_json": WRITTEN,
    "--checkpoint": WRITTEN,
}
MEETING = {"--rank": PLACE, "--master_addr": PLACE, "--master_port": PLACE}
RL_TUTORIAL = {
    "--world_size 3": differs(text),
    "--max_episodes 2": says("Not solved after 2 episodes."),
    "--log_interval 2": lists(r"^Episode (\d+)", ["2", "4"]),
    "--gamma 0.1": differs(text),
    "--seed 2": differs(text),
}

# Of the programs in Ray and Monarch, which run only where these libraries are.
MIGRATING = "tests/pages/test_migrating.py"
ONE_TRAINER = ShownBy(MIGRATING, "test_one_trainer_has_the_losses_of_one_process")
ELSEWHERE = {
    "--world_size": ONE_TRAINER,
    "--seed": ONE_TRAINER,
    "--dataset": ONE_TRAINER,
    "--data_dir": ShownBy(MIGRATING, "test_images_are_read_from_a_folder"),
}
PS_TUTORIAL = {
    "--dataset mnist --data_dir noise": differs(losses),
    "--data_dir": ShownBy(THIS_FILE, "test_a_flag_has_its_effect"),  # by the row above
    "--seed 2": differs(losses),
}

# {program: {a flag, and perhaps a value and further flags: what this changes}}
EFFECTS = {
    "rl_rpc/main.py": GLUE
    | {
        "--mode": ShownBy("tests/learning/rl_rpc/test_equivalence.py", "test_rpc_calls_by_mode"),
        "--seed 2": differs(values_of("reward/last")),
        "--plot": ShownBy("tests/jobs/rl_rpc/test_runs.py", "test_default_command_prints_what_the_tutorial_prints"),
        "--resume --max_episodes 5": Shows(
            lambda new, old: (
                "Going on after episode 4," in new.text and new.summary["env_steps"] > old.summary["env_steps"]
            )  # the steps of the first run count too
        ),
        "--on_lost": ShownBy("tests/jobs/test_lost_workers.py", "test_the_others_go_on_without_a_lost_worker"),
        "--env_id Acrobot-v1 --max_episodes 1": equals(shape("policy", "affine1.weight"), (128, 6)),
        "--gamma 0.5": differs(lambda run: run.state["policy"]["affine1.bias"].tolist()),
        "--lr 0.1": differs(lambda run: run.state["policy"]["affine1.bias"].tolist()),
        "--reward_threshold 1": says("Solved! "),
        "--max_episodes 2": equals(summary("episodes"), 2),
        "--log_interval 2": lists(r"^Episode (\d+)", ["2", "4"]),
        "--eval_episodes 1": says("Greedy policy over 1 "),
        "--save policy.pt": Shows(lambda new, old: (new.folder / "policy.pt").exists()),
    },
    "rnn_rpc/main.py": GLUE
    | {
        "--mode": ShownBy(
            "tests/learning/rnn_rpc/test_equivalence.py", "test_bytes_on_the_wire_are_what_the_tensors_weigh"
        ),
        "--seed 2": differs(values_of("loss/train")),
        "--plot": ShownBy("tests/jobs/rnn_rpc/test_runs.py", "test_a_run_prints_that_it_learns"),
        "--resume --epochs 2": Shows(
            lambda new, old: (
                f"Going on after epoch 1, with a held-out perplexity of {old.summary['heldout_perplexity']:.3f}."
                in new.text
            )
        ),
        f"--corpus text {NOT_GENERATED}": equals(summary("vocabulary"), 10),
        "--tokens char": Shows(lambda new, old: new.summary["vocabulary"] == 15, base=f"--corpus text {NOT_GENERATED}"),
        "--vocabulary 20": equals(shape("model", "table", "encoder.weight"), (20, 8)),
        "--corpus_tokens 8000": MORE_STEPS,
        "--generate 5": Shows(lambda new, old: re.search(r"^([a-z]+ ){4}[a-z]+$", new.text, re.M)),
        "--embedding_dim 4": equals(shape("model", "table", "encoder.weight"), (30, 4)),
        "--hidden_dim 4": equals(shape("model", "decoder", "decoder.weight"), (30, 4)),
        "--num_layers 2": Shows(lambda new, old: "weight_ih_l1" in new.state["model"]["rnn"]),
        "--dropout 0.5": differs(values_of("perplexity/train")),
        "--epochs 2": equals(steps_of("perplexity/heldout"), [1, 2]),
        "--batch_size 10": MORE_STEPS,
        "--bptt 10": MORE_STEPS,
        "--optimizer adam": Shows(lambda new, old: "exp_avg" in str(new.state["optimizers"])),
        "--lr 0.1": differs(values_of("perplexity/heldout")),
        "--clip 0.001": differs(values_of("perplexity/heldout")),
        "--log_interval 2": Shows(lambda new, old: steps_of("loss/train")(new)[:2] == [2, 4]),
    },
    "ddp_rpc/main.py": GLUE
    | {
        "--mode": ShownBy(
            "tests/learning/ddp_rpc/test_equivalence.py", "test_sync_trainers_equal_one_process_on_the_joined_batch"
        ),
        "--seed 2": differs(values_of("loss/train")),
        "--plot": ShownBy("tests/jobs/test_files.py", "test_to_resume_a_finished_run_is_no_failure"),
        "--resume --epochs 2": says("Going on after epoch 1"),
        # With the default, one of its two servers would be a second trainer.
        "--num_servers": ShownBy(
            "tests/learning/ddp_rpc/test_equivalence.py", "test_hogwild_with_one_trainer_equals_one_process"
        ),
        "--num_embeddings 30": equals(shape("table"), (30, 4)),
        "--embedding_dim 8": equals(shape("table"), (20, 8)),
        "--batch_bags 16": Shows(
            lambda new, old: 15 < new.summary["samples_per_second"] / new.summary["batches_per_second"] < 17
        ),
        "--batches 10": equals(steps_of("loss/train"), [5, 10]),
        "--epochs 2": equals(steps_of("heldout/loss"), [0, 1, 2]),
        "--lr 0.5": differs(values_of("heldout/loss")),
        # Nobody can foresee classes that are drawn at random. There are eight of them.
        "--targets random": Shows(lambda new, old: new.summary["ceiling_accuracy"] < 0.2),
        "--sparse": ShownBy(
            "tests/learning/ddp_rpc/test_sharding.py", "test_the_flag_decides_whether_gradients_are_sparse"
        ),
        "--log_interval 1": Shows(  # of which the one point of the plain run is the mean
            lambda new, old: (
                steps_of("loss/train")(new) == [1, 2, 3, 4, 5]
                and values_of("loss/train")(old) == [pytest.approx(statistics.mean(values_of("loss/train")(new)))]
            )
        ),
        "--table_device": ShownBy(
            "tests/learning/ddp_rpc/test_pretend_device.py", "test_the_table_may_stay_on_the_cpu"
        ),
    },
    "param_server/main.py": GLUE
    | {
        "--mode": ShownBy("tests/learning/param_server/test_replay.py", REPLAY),
        "--seed 2": differs(values_of("loss")),
        "--plot curve.png": Shows(lambda new, old: (new.folder / "curve.png").exists()),
        "--resume --epochs 2": says("Going on after update 6,"),
        "--on_lost": ShownBy(
            "tests/jobs/param_server/test_lost_trainers.py", "test_a_killed_trainers_batches_go_to_the_others"
        ),
        f"--dataset synthetic {NO_FOLDER}": differs(values_of("loss")),
        "--data_dir other_noise": differs(values_of("loss")),
        "--epochs 2": equals(steps_of("test accuracy"), [6, 12]),
        "--max_batches 3": equals(summary("updates"), 3),
        "--batch_size 8": equals(summary("images_applied"), [48]),
        "--lr 0.1": differs(values_of("loss")),
        "--lr_step 1": differs(values_of("loss"), base="--epochs 2"),
        "--momentum 0.9": differs(values_of("loss")),
        # A resumed run may have another one.
        "--momentum 0.5": differs(values_of("loss"), base="--resume --epochs 2"),
        "--no_dropout": differs(values_of("loss")),
        "--log_interval 3": equals(steps_of("loss"), [1, 4]),  # updates
        "--evaluations 2": equals(steps_of("test accuracy"), [3, 6]),
        "--max_staleness": ShownBy("tests/learning/param_server/test_replay.py", REPLAY),
        "--num_servers 3": Shows(
            lambda new, old: len(new.state["shards"]) == 2,  # besides the first server
            base="--mode sharded --world_size 4",
        ),
        "--num_gpus": ShownBy("tests/jobs/param_server/test_runs.py", "test_a_trainers_num_gpus_is_not_ignored"),
    },
    "rl_rpc/play.py": {
        "--episodes 2": lists(r"^Episode (\d+)", ["1", "2"]),
        "--seed 2": differs(text),
        "--gif": ShownBy("tests/jobs/rl_rpc/test_runs.py", "test_gif_or_one_line_that_says_what_is_missing"),
    },
    "rl_rpc/tutorial.py": MEETING | RL_TUTORIAL,
    "rl_rpc/single.py": RL_TUTORIAL,
    "rl_rpc/tutorial_batch.py": MEETING
    | {
        "--world_size 3": lists(r"^(\d+), ", ["2", "3"]),
        "--no_batch": ShownBy("tests/learning/rl_rpc/test_tutorial_batch.py", "test_batch_page_in_terminals"),
        "--num_episode 1": lists(r"^Episode (\d+)", ["0", "0"]),  # of the jobs with and without batching
        "--gamma nan": Fails("nan"),  # the first updates by Adam are nearly the same for all discount factors
        "--seed 2": differs(episodes),
    },
    "rl_rpc/elastic.py": MEETING
    | {
        "--seconds": ELASTIC_LIMIT,
        "--max_episodes": ELASTIC_LIMIT,
    },
    "rnn_rpc/tutorial.py": MEETING
    | {
        "--world_size 3": Fails("invalid choice: 3"),  # there are two roles, and so two ranks
        # Two runs with one seed print nearly the same, but not quite. Torch takes no seed as large as this.
        "--seed 99999999999999999999": Fails("torch.manual_seed(args.seed"),
    },
    "rnn_rpc/single.py": {"--seed 2": differs(text)},
    "ddp_rpc/tutorial.py": MEETING
    | {
        "--world_size 4": lists("^(Training done for epoch 0)", ["Training done for epoch 0"] * 2),
        "--num_gpus 1": says("Trainer 0 uses "),
        "--seed 2": differs(text),
    },
    "ddp_rpc/single.py": {
        "--num_gpus 1": says("Trainer 0 uses "),
        "--seed 2": differs(text),
    },
    "param_server/tutorial.py": MEETING
    | PS_TUTORIAL
    | {
        "--world_size 3": says("Rank 2 training batch "),
        "--num_gpus 1": says("Using 1 GPUs to train"),
    },
    "param_server/single.py": PS_TUTORIAL | {"--num_gpus 1": says("Using 1 GPUs to train")},
    "param_server/tutorial_batch.py": MEETING
    | {
        "--world_size 4": says("trainer3 "),
        "--num_batches 2": lists(r"Finish training: (\d+) updates", ["2"]),
        "--no_batch": lists(r"Finish training: (\d+) updates", ["8"]),
        "--seed 2": differs(lambda run: sorted(losses(run))),  # the trainers print in any order
    },
    "docs/primer.py": MEETING
    | {
        "--world_size 3": says("worker2: "),
        "--seed 2": differs(lambda run: sorted(run.text.splitlines())),
        "--lr 0.5": says("after one step of SGD, lr 0.5:"),
    },
    "docs/migrating/monarch_parameter_server.py": ELSEWHERE,
    "docs/migrating/ray_parameter_server.py": ELSEWHERE,
}

# The flags of a program's small run.
SMALL = {
    "rl_rpc/main.py": "--mode rollout --max_episodes 4 --log_interval 1 --eval_episodes 0",
    "rnn_rpc/main.py": "--corpus_tokens 4000 --epochs 1 --embedding_dim 8 --hidden_dim 8 --log_interval 5",
    "ddp_rpc/main.py": "--world_size 3 --num_embeddings 20 --embedding_dim 4 --batches 5 --epochs 1 --log_interval 5",
    "param_server/main.py": "--world_size 2 --data_dir noise --max_batches 6 --batch_size 16 --log_interval 1",
    "rl_rpc/tutorial.py": "--max_episodes 4 --log_interval 1",
    "rl_rpc/single.py": "--max_episodes 4 --log_interval 1",
    "rl_rpc/tutorial_batch.py": "--world_size 2 --num_episode 4",
    "rl_rpc/play.py": "--episodes 1",
    "ddp_rpc/tutorial.py": "--world_size 3",
    "param_server/tutorial.py": "--world_size 2 --dataset synthetic",
    "param_server/single.py": "--dataset synthetic",
    "param_server/tutorial_batch.py": "--world_size 3 --num_batches 4",
}
# Where no flag makes a program small, constants are changed.
SMALLER = {
    "rl_rpc/tutorial_batch.py": [("NUM_STEPS = 500", "NUM_STEPS = 50")],
    "rnn_rpc/tutorial.py": [("range(160)", "range(16)"), ("total_loss / 160", "total_loss / 16")],
    "rnn_rpc/single.py": [("range(160)", "range(16)"), ("total_loss / 160", "total_loss / 16")],
}
# These programs are ended when they have printed this, and what they print afterwards does not count.
UNTIL = {
    "rnn_rpc/tutorial.py": "epoch 0: .*\n",
    "rnn_rpc/single.py": "epoch 0: .*\n",
    "ddp_rpc/tutorial.py": r"(?s:.*?epoch 0: [^\n]*\n){2}|epoch 1: .*\n",
    "ddp_rpc/single.py": "epoch 1: .*\n",
    "param_server/tutorial.py": r"(?s:.*?batch 5 [^\n]*\n){2}|batch 10 .*\n",
    "param_server/single.py": "batch 5 .*\n",
}


# ---------------------------------------------------------------------------------------------------------- small runs


class Run:
    """What a program has printed and written in a small run."""

    def __init__(self, path, flags):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        (self.folder / "text").write_text("the cat sat on the mat and the dog sat on the log\n" * 60)
        words, until = [*SMALL.get(path, "").split(), *flags.split()], UNTIL.get(path)
        if path.endswith("/main.py"):
            words += ["--summary_json", "summary.json", "--checkpoint", "checkpoint.pt"]
        elif path.endswith("/play.py"):
            words.append(plain_run("rl_rpc/main.py").folder / "checkpoint.pt")
        elif "--master_port" in EFFECTS[path]:
            words += ["--master_port", free_port()]
        for name in {"noise", "other_noise"} & {*words}:
            write_noise(self.folder / name)
        if path in SMALLER:
            path = changed(copied_alone(path, self.folder), *SMALLER[path])
        if "--resume" in words:
            shutil.copy(plain_run(path).folder / "checkpoint.pt", self.folder)
        with Program(path, *words, env={"PYTHONUNBUFFERED": "1"}, cwd=self.folder) as program:
            printed = until and program.wait_for_text(until)
            if not until:
                program.wait()
            self.status, self.text, self.errors = program.poll(), program.output(), program.errors()
        if printed:
            self.text = self.text[: re.search(until, self.text).end()]

    @functools.cached_property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    @functools.cached_property
    def state(self):
        return torch.load(self.folder / "checkpoint.pt", weights_only=True)["state"]


@functools.cache
def plain_run(path, flags=""):
    """Return the Run without a row's own flags."""
    run = Run(path, flags)
    assert not run.status, (run.text, run.errors)
    return run


ROWS = [(path, flags, row) for path, rows in EFFECTS.items() for flags, row in rows.items()]


@pytest.mark.parametrize(
    ("path", "flags", "row"),
    [pytest.param(*each, id=f"{each[0]} {each[1]}") for each in ROWS if not isinstance(each[2], ShownBy)],
)
@pytest.mark.draw(24)
def test_a_flag_has_its_effect(path, flags, row):
    if isinstance(row, Fails):
        run = Run(path, flags)
        assert run.status and row.words in run.errors, (run.status, run.text, run.errors)
    else:
        old = plain_run(path, row.base)
        assert not row.true_of(old, old), "this is true without the flag, too"
        run = Run(path, f"{row.base} {flags}")
        assert not run.status and row.true_of(run, old), (run.status, run.text, run.errors)


COMPARED = [(path, row) for path, _, row in ROWS if isinstance(row, Shows) and row.figure]


@pytest.mark.parametrize(("path", "base"), sorted({(path, row.base) for path, row in COMPARED}))
@pytest.mark.draw(4)
def test_what_is_compared_is_the_same_in_a_second_run(path, base):
    """Otherwise it would differ without the flag, too."""
    old, again = plain_run(path, base), Run(path, base)
    for figure in [row.figure for program, row in COMPARED if (program, row.base) == (path, base)]:
        assert figure(again) == figure(old)


# --------------------------------------------------------------------------------------------------------- other tests


def programs_with_flags():
    """Return the paths of all programs in the packages and in docs/ that have a command line."""
    found = [path for each in (*PACKAGES, "docs", "docs/migrating") for path in (ROOT / each).glob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in found if "def parse_args" in path.read_text())


@pytest.mark.parametrize("path", programs_with_flags())
@pytest.mark.draw(6)
def test_the_table_has_every_flag(path):
    """argparse lists each flag on a line of its own, with other spellings behind it."""
    if path.startswith("docs/migrating/"):  # it needs its library even for --help
        listed = re.findall(r'add_argument\("(--\w+)"', (ROOT / path).read_text())
    else:
        listed = re.findall(r"^  (--\w+)", run_script(path, "--help").stdout, re.M)
    assert listed
    assert {*listed} == {flags.split()[0] for flags in EFFECTS[path]}


def test_the_tests_that_the_table_names_exist():
    for path, test in {(row.path, row.test) for _, _, row in ROWS if isinstance(row, ShownBy)}:
        assert f"\ndef {test}(" in (ROOT / path).read_text(), (path, test)


@pytest.mark.parametrize("path", [path for path, rows in EFFECTS.items() if PLACE in rows.values()])
@pytest.mark.draw(4)
def test_a_rank_goes_where_the_flags_say(path):
    """The test listens there, so the rank that the flags ask for connects to it. No other rank is started."""
    with socket.create_server(("127.0.0.3", 0)) as listener:
        address = listener.getsockname()
        place = ("--rank", 1, "--master_addr", address[0], "--master_port", address[1])
        with Program(path, *place) as program:
            listener.settimeout(60)
            connection, _ = listener.accept()
            with connection:
                assert program.members() == [program.pid]


def test_only_shared_memory_has_sockets_of_its_own():
    """Over shm, the processes of one host find each other by Unix sockets."""
    counts = {}
    for transport in ("shm", "uv"):
        flags = ("--transport", transport, "--max_episodes", 1_000_000, "--log_interval", 1)
        with Program("rl_rpc/main.py", *flags) as program:
            assert program.wait_for_text("Episode 1"), program.text()
            counts[transport] = sum(map(listening_unix_sockets, program.members()))
    assert counts["shm"] >= counts["uv"] + 2, counts  # there are two ranks


def listening_unix_sockets(pid):
    """Return how many Unix sockets this process listens at."""
    with open("/proc/net/unix") as file:
        lines = [line.split() for line in list(file)[1:]]
    listening = {f"socket:[{inode}]" for _, _, _, flags, _, _, inode, *_ in lines if int(flags, 16) & 0x10000}
    folder = pathlib.Path(f"/proc/{pid}/fd")
    return sum(os.readlink(each) in listening for each in folder.iterdir() if each.is_symlink())
