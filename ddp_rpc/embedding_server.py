"""The embedding table: what lives on the parameter servers, and what trainers and master may ask of it over RPC.

Runs in the server processes, on RPC threads: each request on a thread of its own, several at once.  The servers have no
loop; they create their shard when the master asks for it (rpc.remote) and answer until everybody is done.

Row i of the table lives on server i % S, there as row i // S.  A bag's ids may lie on all servers; each sums up the
rows that it has, and because the mode is "sum" the trainer gets the whole bag's sum by adding up the servers' parts.

Shapes: B bags in a batch, I ids in a batch, N rows of the table, S servers (shards), D embedding dimensions.
"""

import resource

import torch
import torch.distributed.rpc as rpc
from torch import nn

from glue.tensors import to_wire
from staleness import StalenessCounter

# nn.EmbeddingBag starts with N(0, 1): so large against a step of lr 0.05 that the rows would take for ever to learn.
INITIAL_STD = 0.1
BLOCK_ROWS = 65536


class EmbeddingShard(nn.EmbeddingBag):
    """The rows of one server: an nn.EmbeddingBag(mode="sum") that answers trainers, several at once.

    All that mode `sync` needs of a server is here.  The other modes add to it: averaged_server.py, pipelined_server.py.
    """

    def __init__(self, shard, num_shards, num_embeddings, embedding_dim, *, sparse, seed, device):
        """Make shard number `shard` of `num_shards` of a table [num_embeddings, embedding_dim].

        `sparse`: make sparse gradients; `seed`: the whole table's first values follow from it; `device`: a string.
        """
        num_rows = len(range(shard, num_embeddings, num_shards))
        super().__init__(num_rows, embedding_dim, mode="sum", sparse=sparse, device=device)
        self.shard = shard
        self.num_shards = num_shards
        self.staleness_counter = StalenessCounter(self.weight)
        self.draw_first_values(num_embeddings, seed)

    def ready(self):
        """Return when the constructor above has returned: a call through an RRef waits until its object is made."""

    def retrieve_embedding_parameters(self):
        """Return an RRef to each parameter, for DistributedOptimizer (the tutorial has a function)."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def look_up(self, ids_I, offsets_B, with_gradient):
        """Return the sums [B, D] of this shard's rows, bag by bag, as they travel; an empty bag gives zeros.

        Inside a dist_autograd context, backward will find its way back to here.  `with_gradient` is False where no
        gradient will come, as in an evaluation: then no graph is built.  The trainer must say so, because its
        torch.no_grad() holds for its own thread, and does not reach this process.
        """
        with torch.set_grad_enabled(with_gradient):
            return to_wire(self(ids_I, offsets_B))

    def forward(self, ids_I, offsets_B):
        """Return the sums [B, D] where the table is.

        Needs no lock: it reads rows that other trainers may be stepping at this moment, and may see some of them
        before and some after the step.  That is Hogwild (Niu et al. 2011), and what the tutorial does too.
        """
        device = self.weight.device
        sums_BD = super().forward(ids_I.to(device), offsets_B.to(device))
        self.staleness_counter.watch(sums_BD)
        return sums_BD

    # ---------------------------------------------------------------------------------- the rows, while nobody trains

    def draw_first_values(self, num_embeddings, seed):
        """Fill this shard's rows with random numbers."""
        # Every server draws the whole table, but keeps only its own rows, block by block: the start does not depend
        # on the number of servers, and no server ever holds more than its share.
        generator = torch.Generator().manual_seed(seed)
        for first in range(0, num_embeddings, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, num_embeddings - first)
            self.put_rows(first, torch.randn(rows, self.embedding_dim, generator=generator) * INITIAL_STD)

    @torch.no_grad()
    def put_rows(self, first, rows_ND):
        """Take this shard's own out of rows first, first + 1, ... of the whole table.  Not while anybody trains."""
        skip = (self.shard - first) % self.num_shards
        own = rows_ND[skip :: self.num_shards]
        start = (first + skip) // self.num_shards
        self.weight[start : start + len(own)] = own.to(self.weight.device)

    def get_rows(self):
        """Return this shard's rows [N / S, D].  Not while anybody trains."""
        return to_wire(self.weight.detach())

    # ------------------------------------------------------------------------------------------- for the run's summary

    def staleness(self):
        """Return {staleness: how many gradients had it}.  Reads only."""
        return self.staleness_counter.counts

    def megabytes(self):
        """Return (this shard's table, the peak of this process's memory), both in 10^6 bytes.  Reads only."""
        return self.weight.nbytes / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
