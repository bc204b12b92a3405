"""The embedding table, divided among the servers.

Row i of the table is on server i % S, where it is row i // S; this part of the table is a *shard*. The rows of one bag
may be on several servers. Each server adds up the rows that it has, and the trainer adds up the results.

Shapes: B bags in a batch, I ids in a batch, N rows of the table, S servers, D embedding dimensions.
"""

from glue import checkpoint

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn

# nn.EmbeddingBag draws its first values from N(0, 1). With a learning rate of 0.05 the updates are so small beside
# these values that training would take very long.
INITIAL_STD = 0.1
BLOCK_ROWS = 65536


class Shard(nn.EmbeddingBag):  # on a server
    """Rows shard, shard + S, shard + 2 S, ... of a table (num_embeddings, embedding_dim)."""

    def __init__(self, shard, num_shards, num_embeddings, embedding_dim, *, sparse, seed, device):
        num_rows = len(range(shard, num_embeddings, num_shards))
        super().__init__(num_rows, embedding_dim, mode="sum", sparse=sparse, device=device)
        # Every server draws the values of the whole table, in blocks, and keeps its own rows of each block. So the
        # first values do not depend on the number of servers, and no server has to hold the whole table.
        generator = torch.Generator().manual_seed(seed)
        for first in range(0, num_embeddings, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, num_embeddings - first)
            block_ND = torch.randn(rows, embedding_dim, generator=generator) * INITIAL_STD
            skip = (shard - first) % num_shards
            own = block_ND[skip::num_shards]
            start = (first + skip) // num_shards
            with torch.no_grad():
                self.weight[start : start + len(own)] = own.to(device)

    def state_dict(self, *args, **kwargs):
        return {name: value.cpu() for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state):
        with checkpoint.going_on_from():
            super().load_state_dict(state)


def create_table(shard_class, servers, num_embeddings, embedding_dim, *, sparse, seed):
    """Make a shard on each server; return RRefs to them. `servers`: {rank: device}. The master calls this."""
    emb_rrefs = []
    for shard, (server, device) in enumerate(servers.items()):
        shard_args = (shard, len(servers), num_embeddings, embedding_dim)
        keywords = {"sparse": sparse, "seed": seed, "device": device}
        # timeout=0 means no limit: to fill a large table with random numbers may take more than 60 seconds.
        emb_rrefs.append(rpc.remote(server, shard_class, shard_args, keywords, timeout=0))
    return emb_rrefs


def split_by_shard(ids_I, offsets_B, num_shards):
    """Split one batch into a list of (ids, offsets), one pair for each shard.

    Each pair has B bags, of which some may be empty. Its ids are row numbers within the shard. ids_I and offsets_B are
    int64 tensors, as for nn.EmbeddingBag.
    """
    if num_shards == 1:
        return [(ids_I, offsets_B)]
    shard_I = ids_I % num_shards
    row_I = ids_I // num_shards
    parts = []
    for shard in range(num_shards):
        mine_I = shard_I == shard
        # A bag begins after k ids of the batch. If this shard has m of these k ids, the bag begins after m ids in this
        # shard's part.
        mine_before = F.pad(mine_I.cumsum(0), (1, 0))
        parts.append((row_I[mine_I], mine_before[offsets_B]))
    return parts


# For checkpoints, while no trainer trains. timeout=0: a large table may take long.


def gather_table(emb_rrefs):
    """Return the whole table (N, D)."""
    states = torch.futures.wait_all([emb_rref.rpc_async(timeout=0).state_dict() for emb_rref in emb_rrefs])
    parts = [state["weight"] for state in states]
    table_ND = torch.empty(sum(map(len, parts)), parts[0].shape[1])
    for shard, part in enumerate(parts):
        table_ND[shard :: len(parts)] = part
    return table_ND


def scatter_table(table_ND, emb_rrefs):
    """Set the rows of all shards. The table may come from a run with another number of servers."""
    for shard, emb_rref in enumerate(emb_rrefs):
        rows = table_ND[shard :: len(emb_rrefs)].contiguous()
        emb_rref.rpc_sync(timeout=0).load_state_dict({"weight": rows})
