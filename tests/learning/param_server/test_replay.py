"""Several trainers of different speeds, in every mode whose updates can be made again from the list of them.

main.py writes such a list into its summary: from which weights each gradient was computed, and in which order the
gradients were applied. Made again in one process, the updates must end with the same weights.
"""

import pytest

from helpers import load_oracle
from patches import main_with

oracle = load_oracle("param_server")
TRAINERS, BATCHES, EPOCHS = 3, 23, 2
IMAGES = 8 * BATCHES - 2  # the last batch is smaller
DONE = (9, 18, 23)  # batches at the evaluations of an epoch, which are after whole rounds


def slow(time, data, net):
    """Trainer 1 is slow, and so is reading the weights one by one: an update could come between two of them."""

    import torch.distributed.rpc as rpc

    get, named_parameters = data.Batches.get, net.Net.named_parameters

    def get_slowly(self, *which):
        time.sleep(0.05 if rpc.get_worker_info().id == 1 else 0.005)
        return get(self, *which)

    def read_slowly(self, *which, **how):
        for each in named_parameters(self, *which, **how):
            time.sleep(0.002)
            yield each

    data.Batches.get, net.Net.named_parameters = get_slowly, read_slowly


@pytest.mark.parametrize(
    "mode", ["remote", "replica", pytest.param("bounded", marks=pytest.mark.quick), "sync", "overlap", "sharded"]
)
def test_every_update_of_concurrent_trainers_is_right(tmp_path, digits_of_size, mode):
    """With momentum, --lr_step, checkpoints, a smaller last batch, and a last round with a batch too few.

    `sharded` has one server here, because the list has the order in which the first one applies the gradients.
    """
    main = main_with("param_server", tmp_path, slow)
    flags = ("--mode", mode, "--world_size", TRAINERS + 1, "--epochs", EPOCHS, "--lr_step", 1, "--batch_size", 8)
    flags = (*flags, "--lr", 0.02, "--momentum", 0.5, "--evaluations", 3)
    flags += {"bounded": ("--max_staleness", 0), "sharded": ("--num_servers", 1)}.get(mode, ())
    digits = digits_of_size(IMAGES)
    summary, _, weights = oracle.distributed(tmp_path, digits, *flags, main=main)
    updates = summary["update_list"]
    _, expected = oracle.train(updates, digits, batch_size=8, lr=0.02, momentum=0.5)
    oracle.assert_same_weights(weights, expected, tolerance=2e-6)

    stale = []
    for epoch in range(EPOCHS):
        of_epoch = [update for update in updates if update["epoch"] == epoch]
        batches = [batch for update in of_epoch for batch in update["batches"]]
        assert sorted(batches) == [*range(BATCHES)]  # each once
        # At an evaluation, all batches before it are applied, and no others.
        for done in DONE:
            assert sorted(batches[:done]) == [*range(done)]
        first = sum(update["epoch"] < epoch for update in updates)
        assert min(version for update in of_epoch for version in update["versions"]) >= first
        if epoch == 0:  # nobody gets two batches before each trainer has one
            order = [trainer for update in of_epoch for trainer in update["trainers"]]
            trainers = dict(zip(batches, order, strict=True))
            assert {trainers[batch] for batch in range(TRAINERS)} == {1, 2, 3}
    for number, update in enumerate(updates):
        stale += [number - version for version in update["versions"]]
    assert summary["staleness_max"] == max(stale)
    assert summary["staleness_mean"] == pytest.approx(sum(stale) / len(stale), abs=1e-3)
    assert summary["updates"] == len(updates) and summary["images_applied"] == [IMAGES] * EPOCHS

    if mode in ("sync", "bounded"):
        # While the slow trainer computes a gradient, each of the others makes one update at most.
        assert max(stale) <= {"sync": 0, "bounded": TRAINERS - 1}[mode], stale
    else:  # updates came between, so the test shows something
        assert sum(each > 0 for each in stale) > TRAINERS, stale
        assert mode == "remote" or max(stale) > TRAINERS - 1, stale  # more than `bounded` allows
    if mode == "bounded":
        done = dict.fromkeys(range(1, TRAINERS + 1), 0)
        for update in updates:
            done[update["trainers"][0]] += 1
            assert max(done.values()) - min(done.values()) <= 1, updates  # --max_staleness 0, and one under way
    if mode == "sync":  # two trainers make the last update of an epoch, because one batch is missing
        assert [len(update["batches"]) for update in updates] == [*[TRAINERS] * 7, TRAINERS - 1] * EPOCHS
