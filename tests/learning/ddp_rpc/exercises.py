"""The check of exercise 3 of docs/exercises/ddp_rpc.md.

It fails on the package as published, which has no solution of this exercise. So the name of this file does not begin
with `test_`, and pytest runs it only if it is named.
"""

import pickle

import torch

from helpers import load_oracle

oracle = load_oracle("ddp_rpc")
ROWS, DIM = 1000, 16
FIGURES = {"heldout_loss": 1.0, "heldout_accuracy": 0.5, "ceiling_accuracy": 0.75}
FLAGS = ("--num_embeddings", ROWS, "--embedding_dim", DIM, "--checkpoint")


class CountingRRef(oracle.LocalRRef):
    """Replaces an RRef: its calls run in this process, and the bytes of their answers are counted."""

    answered_bytes = 0

    def rpc_sync(self, timeout=None):
        return CountedCalls(self.value)

    def rpc_async(self, timeout=None):
        return oracle.AsyncCalls(CountedCalls(self.value))


class CountedCalls:
    def __init__(self, value):
        self.value = value

    def __getattr__(self, name):
        def call(*args):
            answer = getattr(self.value, name)(*args)
            CountingRRef.answered_bytes += len(pickle.dumps(answer))
            return answer

        return call


def new_master(num_servers, *flags):
    """Return a master and its shards, all in this process."""
    args = oracle.main.parse_args([str(flag) for flag in flags])
    more = {"sparse": True, "seed": 3, "device": "cpu"}
    shards = [oracle.hogwild.EmbeddingShard(number, num_servers, ROWS, DIM, **more) for number in range(num_servers)]
    master = oracle.progress.Progress(args, [CountingRRef(shard) for shard in shards], oracle.main.RESUME_KEYS)
    master.start()
    return master, shards


def test_changed_rows(tmp_path):
    """The first checkpoint gets the whole table from the servers, the next ones get only the rows that have changed."""
    file = tmp_path / "end.pt"
    master, shards = new_master(2, *FLAGS, file, "--world_size", 5, "--num_servers", 2)
    optimizers = [torch.optim.SGD(shard.parameters(), lr=1.0) for shard in shards]
    sent = []
    for epoch, ids in enumerate(([0, 1, 2], [3, 500, 999], [3, 4], []), 1):
        if ids:
            table_parts = oracle.shards.split_by_shard(torch.tensor(ids), torch.tensor([0]), 2)
            for shard, optimizer, part in zip(shards, optimizers, table_parts, strict=True):
                shard(*part).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        CountingRRef.answered_bytes = 0
        master.after_epoch(epoch, FIGURES, 1.0, {})
        sent.append(CountingRRef.answered_bytes)
        saved = torch.load(file, weights_only=True)["state"]["table"]
        assert torch.equal(saved, oracle.whole_table(shards)), epoch
    whole = ROWS * DIM * 4
    assert sent[0] >= whole and max(sent[1:]) < whole / 10, sent
    again, _ = new_master(3, *FLAGS, file, "--world_size", 6, "--num_servers", 3, "--resume")
    again.after_epoch(5, FIGURES, 1.0, {})
    assert torch.equal(torch.load(file, weights_only=True)["state"]["table"], saved)
