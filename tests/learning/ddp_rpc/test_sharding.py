"""Single parts of ddp_rpc: sharded lookups, the click log, averaging on a server."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import load_oracle

oracle = load_oracle("ddp_rpc")
hogwild, main, pipelined, sync, trainer = oracle.hogwild, oracle.main, oracle.pipelined, oracle.sync, oracle.trainer
ClickLog, whole_table = oracle.ClickLog, oracle.whole_table
quick = pytest.mark.quick


def make_shards(num_shards, sparse=True, shard_class=hogwild.EmbeddingShard):
    """Return the shards of a table of 30 rows of 5 numbers, for this number of servers."""
    shards = []
    for number in range(num_shards):
        shard = shard_class(number, num_shards, 30, 5, sparse=sparse, seed=3, device="cpu")
        if shard_class is not hogwild.EmbeddingShard:
            shard.set_learning_rate(0.05)
        shards.append(shard)
    return shards


@quick
@settings(deadline=None, max_examples=60)
@given(
    bags=st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=10), min_size=1, max_size=12),
    num_shards=st.integers(1, 7),
    sparse=st.booleans(),
)
def test_sharded_lookup_equals_one_embedding_bag(bags, num_shards, sparse):
    """Forward pass and gradients are equal to 1e-6, for any bags, also if a shard has none of the ids."""
    shards = make_shards(num_shards, sparse=sparse)
    whole = nn.EmbeddingBag.from_pretrained(whole_table(shards), freeze=False, mode="sum")
    ids = torch.tensor([i for bag in bags for i in bag])
    offsets = torch.tensor([0, *[len(bag) for bag in bags[:-1]]]).cumsum(0)
    gradient = torch.randn(len(bags), 5, generator=torch.Generator().manual_seed(len(ids)))

    expected = whole(ids, offsets)
    expected.backward(gradient)
    parts = oracle.shards.split_by_shard(ids, offsets, num_shards)
    found = sum(shard(*part) for shard, part in zip(shards, parts, strict=True))
    found.backward(gradient)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for number, shard in enumerate(shards):
        dense = shard.weight.grad.to_dense() if sparse else shard.weight.grad
        # If an id occurs a hundred times, its gradient is large. So rtol allows a difference of 1e-6 of the gradient.
        torch.testing.assert_close(dense, whole.weight.grad[number::num_shards], rtol=1e-6, atol=1e-6)


@quick
def test_the_table_does_not_depend_on_the_number_of_servers():
    """The table is drawn in blocks, here in three, whose size cannot be divided by 3 or 7."""
    rows = 2 * oracle.shards.BLOCK_ROWS + 5
    tables = []
    for servers in (1, 2, 3, 7):
        kind = {"sparse": True, "seed": 3, "device": "cpu"}
        tables.append(whole_table([oracle.shards.Shard(number, servers, rows, 1, **kind) for number in range(servers)]))
    for table in tables[1:]:
        assert torch.equal(table, tables[0])


@quick
def test_a_gradient_belongs_to_the_oldest_lookup_of_its_trainer():
    (shard,) = make_shards(1, shard_class=pipelined.EmbeddingShard)
    offsets = torch.tensor([0])

    def changed_rows(trainer, next_id=None):
        """Send a gradient, and look up a row if `next_id` is given; return the numbers of the rows that changed."""
        before = shard.weight.detach().clone()
        shard.exchange(trainer, torch.ones(1, 5), None if next_id is None else torch.tensor([next_id]), offsets)
        return (shard.weight.detach().clone() != before).any(dim=1).nonzero().flatten().tolist()

    for number, row in ((0, 3), (1, 5), (0, 8)):
        shard.exchange(number, None, torch.tensor([row]), offsets)
    assert [changed_rows(0, next_id=9), changed_rows(0), changed_rows(1), changed_rows(0)] == [[3], [8], [5], [9]]


@quick
@pytest.mark.parametrize("sparse", [True, False])
def test_averaging_does_not_depend_on_the_order_of_arrival(sparse):
    """The result is the same to the last bit, although a floating-point sum depends on the order of its terms."""
    generator = torch.Generator().manual_seed(1)
    gradients = []
    for _ in range(3):
        (shard,) = make_shards(1, sparse=sparse)
        sums = shard(torch.randint(30, (200,), generator=generator), torch.arange(0, 200, 5))
        sums.backward(torch.randn(40, 5, generator=generator))
        gradients.append(shard.weight.grad)
    means = []
    for arrivals in itertools.permutations(range(3)):
        mean = sync.mean_of({number: gradients[number] for number in arrivals})
        # Otherwise the optimizer would add up the entries of a row, on a GPU in no fixed order.
        assert not sparse or mean.is_coalesced()
        means.append(mean.to_dense())
    assert all(torch.equal(mean, means[0]) for mean in means)
    torch.testing.assert_close(means[0], sum(gradient.to_dense() for gradient in gradients) / 3)


def test_concurrent_exchanges_lose_no_gradient():
    """Eight threads call at the same time, as RPC threads do. A lock protects the updates, so no gradient is lost."""
    (shard,) = make_shards(1, shard_class=pipelined.EmbeddingShard)
    before = shard.state_dict()["weight"].clone()

    def trainer(number):
        for _ in range(100):
            shard.exchange(number, None, torch.arange(30), torch.arange(30))
            shard.exchange(number, torch.ones(30, 5), None, None)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(trainer, range(8)))
    # One lost gradient makes a difference of 0.05.
    torch.testing.assert_close(shard.state_dict()["weight"], before - 0.05 * 8 * 100, rtol=0, atol=1e-3)


# ------------------------------------------------------------------------------------------------------ click log


@quick
def test_every_batch_has_the_same_number_of_bags():
    """DDP takes the mean over trainers. With batches of 4 and 9 bags, this would not be the mean over bags."""
    sizes = set()
    for ids, offsets, target in ClickLog(100, 16, seed=1).batches(50, 8, seed=2):
        assert len(offsets) == len(target) == 8 and offsets[0] == 0
        sizes |= set(torch.diff(offsets, append=torch.tensor([len(ids)])).tolist())
        assert ids.min() >= 0 and ids.max() < 100
    assert sizes == {*range(1, 11)}


@quick
def test_the_teacher_knows_most_of_its_own_labels():
    log = ClickLog(100, 16, seed=1)
    ((ids, offsets, target),) = log.batches(1, 8192, seed=2)
    accuracy = (log.teacher_logits(ids, offsets).argmax(dim=1) == target).float().mean()
    assert 0.6 < accuracy < 0.9


# ------------------------------------------------------------------------------------------------- the run's checks


@quick
def test_the_learning_rate_falls_in_the_second_half_in_a_straight_line():
    """It ends above 0, because with a learning rate of 0 the last epoch would have no effect."""
    rates = [trainer.learning_rate(SimpleNamespace(lr=0.5, epochs=4), epoch) for epoch in (1, 2, 3, 4)]
    assert rates == [0.5, 0.5, 0.375, 0.125]
    assert trainer.learning_rate(SimpleNamespace(lr=0.5, epochs=1), 1) == 0.5


@quick
def test_a_resumed_run_has_the_same_table_and_the_same_data():
    assert {"num_embeddings", "embedding_dim", "targets", "seed"} <= set(main.RESUME_KEYS)
