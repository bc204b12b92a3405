"""Every mode over real RPC, with trainers of different speeds: each update equals that of one process in a replay.

replay_job.py records in which order the server applied which batches, from which weights each gradient was computed,
and the weights after each update.
"""

import json
import re

import pytest

from programs import run_script

JOB = "tests/learning/param_server/replay_job.py"
TRAINERS, BATCHES, EPOCHS = 3, 23, 2
DONE = (9, 18, 23)  # batches at the evaluations of an epoch, which are after whole rounds
FLAGS = ("--dataset", "synthetic", "--no_dropout", "--batch_size", 8)


@pytest.mark.parametrize(
    "mode", ["remote", "replica", pytest.param("bounded", marks=pytest.mark.quick), "sync", "overlap"]
)
def test_every_update_of_concurrent_trainers_is_right(tmp_path, mode):
    """With momentum, --lr_step, checkpoints, a smaller last batch, and a last round with a batch too few."""
    flags = (*FLAGS, "--mode", mode, "--world_size", TRAINERS + 1, "--epochs", EPOCHS, "--lr_step", 1)
    flags = (*flags, "--lr", 0.02, "--momentum", 0.5, "--log_interval", 1000)
    flags = (*flags, "--evaluations", 3, "--checkpoint", tmp_path / "c.pt", "--summary_json", tmp_path / "s.json")
    flags = (*flags, "--max_staleness", 0) if mode == "bounded" else flags
    done = run_script(JOB, 8 * BATCHES - 2, *flags, timeout=200)
    assert done.returncode == 0, done.stderr
    record = json.loads(re.search(r'^{"updates.*', done.stdout, re.M)[0])
    summary = json.loads((tmp_path / "s.json").read_text())
    assert record["difference"] < 1e-6

    updates, stale = record["updates"], []
    for epoch in range(EPOCHS):  # each batch once
        of_epoch = [gradient for at, gradients in updates for gradient in gradients if at == epoch]
        assert sorted(batch for batch, _, _ in of_epoch) == [*range(BATCHES)]
        # from weights that have all updates of the epochs before
        assert min(version for _, _, version in of_epoch) >= sum(at < epoch for at, _ in updates)
    for number, (_, gradients) in enumerate(updates):
        stale += [number - version for _, _, version in gradients]
    assert summary["staleness_max"] == max(stale)
    assert summary["staleness_mean"] == pytest.approx(sum(stale) / len(stale), abs=1e-3)
    assert summary["updates"] == len(updates) and summary["images_applied"] == [8 * BATCHES - 2] * EPOCHS

    if mode in ("sync", "bounded"):
        # While the slow trainer computes a gradient, each of the others makes one update at most.
        assert max(stale) <= {"sync": 0, "bounded": TRAINERS - 1}[mode], stale
    else:  # updates came between, so the test shows something
        assert sum(each > 0 for each in stale) > TRAINERS, stale
        assert mode == "remote" or max(stale) > TRAINERS - 1, stale  # more than `bounded` allows
    if mode == "sync":  # two trainers make the last update of an epoch, because one batch is missing
        assert [len(gradients) for _, gradients in updates] == [*[TRAINERS] * 7, TRAINERS - 1] * EPOCHS

    # A checkpoint knows how many batches of the epoch are done; 0 is the beginning of the next epoch.
    assert [done for _, done in record["saved"]] == [done % BATCHES for done in DONE] * EPOCHS
    for number, (at, _) in enumerate(record["saved"]):
        of_epoch = [batch for epoch, grads in updates[:at] for batch, _, _ in grads if epoch == number // len(DONE)]
        assert sorted(of_epoch) == [*range(DONE[number % len(DONE)])]
