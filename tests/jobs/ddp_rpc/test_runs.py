"""Tests of whole runs of ddp_rpc: their output, and the files that they write."""

import json
import re
from resource import RUSAGE_CHILDREN, getrusage

import pytest

from helpers import assert_one_line_error, load_bench
from patches import main_with
from programs import run_main, run_script

SMALL = ("--batches", 20, "--epochs", 2)


def run(tmp_path, *flags, program="ddp_rpc/main.py", timeout=120):
    """Run main.py, or a changed copy; assert that it succeeds; return (stdout, summary)."""
    file = tmp_path / "summary.json"
    done = run_script(program, *flags, "--summary_json", file, timeout=timeout)
    assert done.returncode == 0 and done.stderr == "", (done.stdout, done.stderr)
    return done.stdout, json.loads(file.read_text())


def every_act_takes_seconds(time, shards, trainer):
    """A trainer when it is made, measures, or trains an epoch; to make a table takes longer."""
    make_table = shards.Shard.__init__

    def make_table_slowly(self, *arguments, **how):
        time.sleep(4)
        make_table(self, *arguments, **how)

    trainer.Trainer.use_device = lambda self: time.sleep(2.2)
    shards.Shard.__init__ = make_table_slowly


def test_pipelined_learns_for_longer_than_an_rpc_may_take(tmp_path):
    """An epoch is one RPC, which would fail with a timeout. A line is printed for each epoch."""
    slow = main_with("ddp_rpc", tmp_path, every_act_takes_seconds)
    flags = ("--mode", "pipelined", "--world_size", 5, "--num_servers", 2, "--epochs", 3, "--lr", 0.2)
    out, summary = run(tmp_path, *flags, "--rpc_timeout", 2, program=slow)
    losses = [float(loss) for loss in re.findall(r"held-out loss (\S+)", out)]
    assert len(losses) == 4 and losses[-1] < 0.9 * losses[0]
    assert summary["heldout_accuracy"] > 0.25 > 0.2 > float(re.search(r"accuracy (\S+)", out)[1])
    assert summary["ceiling_accuracy"] > 0 and summary["samples_per_second"] > 0 < summary["batches_per_second"]


def test_the_default_run_comes_within_two_points_of_the_teacher(tmp_path):
    """Other tests show that each mode equals one process, so only the default mode is trained until it has learned."""
    _, summary = run(tmp_path, timeout=200)
    assert summary["heldout_accuracy"] > summary["ceiling_accuracy"] - 0.02


@pytest.mark.quick
def test_divergence_ends_the_run_in_one_line_and_writes_nothing(tmp_path):
    """With random targets, which nobody can foresee. There are eight of them."""
    files = tmp_path / "summary.json", tmp_path / "model.pt"
    writes = ("--summary_json", files[0], "--checkpoint", files[1])
    done = run_main("ddp_rpc", *SMALL, "--mode", "sync", "--targets", "random", "--lr", 1e9, *writes)
    assert_one_line_error(done, 1, "): step ", "loss is ", "diverged", "--lr")
    assert done.stderr.count("diverged") == 1 and not any(file.exists() for file in files), done.stderr
    assert float(re.search(r"ceiling ([\d.]+)", done.stdout)[1]) < 0.2


def each_trainer_adds_its_rank(hogwild):
    step = hogwild.Trainer.step

    def step_and_add(self, batch):
        loss = step(self, batch)
        self.fc.bias.data += self.rank
        return loss

    hogwild.Trainer.step = step_and_add


def test_trainers_whose_replicas_differ_fail(tmp_path):
    done = run_script(main_with("ddp_rpc", tmp_path, each_trainer_adds_its_rank), *SMALL)
    assert done.returncode == 1 and "the trainers' replicas of fc differ by up to" in done.stderr, done.stderr


def test_what_travels_has_the_size_of_a_batch():
    """The table has 70 MB. If its whole gradient were sent, there would be a thousand times as many bytes."""
    flags = ("--mode", "sync", "--num_embeddings", 1_100_000, "--batches", 40, "--epochs", 1)
    before = getrusage(RUSAGE_CHILDREN).ru_minflt
    done = run_script("bench/bytes_per_step.py", "ddp_rpc", *flags)
    assert done.returncode == 0, done.stderr
    # Page faults: malloc keeps the memory of a gradient for the next one. Otherwise there are 1.4 million, not 360,000.
    assert getrusage(RUSAGE_CHILDREN).ru_minflt - before < 700_000
    assert 1_000 < load_bench("bytes_per_step").per_step(done.stdout) < 30_000
