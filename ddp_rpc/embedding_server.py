"""The embedding table on the parameter servers, and its methods, which trainers and the master call over RPC.

Runs in the server processes, on RPC threads.  Each call has a thread of its own, and several calls run at the same
time.  A server has no loop: it creates its part of the table, a *shard*, when the master calls rpc.remote, and answers
calls until all ranks have finished.

Row i of the table is on server i % S, where it is row i // S.  The rows of one bag may be on several servers.  Each
server adds up the rows that it has, and the trainer adds up the results of all servers.  This gives the sum of the
whole bag, because the bags use the mode "sum".

Shapes: B bags in a batch, I ids in a batch, N rows of the table, S servers (shards), D embedding dimensions.
"""

import resource

import torch
import torch.distributed.rpc as rpc
from torch import nn

from staleness import StalenessCounter

# nn.EmbeddingBag draws its first values from N(0, 1).  With a learning rate of 0.05 the updates are so small beside
# these values that training would take very long.
INITIAL_STD = 0.1
BLOCK_ROWS = 65536


class EmbeddingShard(nn.EmbeddingBag):
    """The rows of one server: an nn.EmbeddingBag(mode="sum") that several trainers can use at the same time.

    Mode `sync` uses this class.  The other modes use subclasses of it: averaged_server.py, pipelined_server.py.
    """

    def __init__(self, shard, num_shards, num_embeddings, embedding_dim, *, sparse, seed, device):
        """Make shard number `shard` of `num_shards` of a table [num_embeddings, embedding_dim].

        `sparse`: whether gradients are sparse; `seed`: determines the first values of the whole table, so it must be
        the same in all shards; `device`: a string.
        """
        num_rows = len(range(shard, num_embeddings, num_shards))
        super().__init__(num_rows, embedding_dim, mode="sum", sparse=sparse, device=device)
        self.shard = shard
        self.num_shards = num_shards
        self.staleness_counter = StalenessCounter(self.weight)
        self.draw_first_values(num_embeddings, seed)

    def ready(self):
        """Do nothing.  A call through an RRef waits until the object exists, so the answer means that it does."""

    def retrieve_embedding_parameters(self):
        """Return an RRef to each parameter, for DistributedOptimizer (in the tutorial, this is a function)."""
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def look_up(self, ids_I, offsets_B, with_gradient):
        """Return the sums [B, D] of this shard's rows in each bag, on the CPU; the sum of an empty bag is 0.

        Trainers call this over RPC.  If the call is made inside a dist_autograd context, backward also runs through
        this lookup.  `with_gradient` is False in an evaluation; then no autograd graph is built.  It must be an
        argument, because a trainer's torch.no_grad() has no effect in this process.
        """
        with torch.set_grad_enabled(with_gradient):
            # RPC's CUDA support is beta, so tensors travel on the CPU.  Autograd follows cpu() and to().
            return self(ids_I, offsets_B).cpu()

    def forward(self, ids_I, offsets_B):
        """Return the sums [B, D] on the table's device.

        Works without a lock.  At the same time, the optimizer of another trainer may change rows, so this may read
        some rows before and some after that update.  This is called Hogwild (Niu et al. 2011).  The tutorial does it,
        too.
        """
        device = self.weight.device
        sums_BD = super().forward(ids_I.to(device), offsets_B.to(device))
        self.staleness_counter.watch(sums_BD)
        return sums_BD

    # ------------------------------------------------------------- all rows at once, while no trainer trains

    def draw_first_values(self, num_embeddings, seed):
        """Fill this shard's rows with random numbers."""
        # Every server draws the values of the whole table, in blocks, and keeps only its own rows of each block. So
        # the first values do not depend on the number of servers, and no server has to hold the whole table.
        generator = torch.Generator().manual_seed(seed)
        for first in range(0, num_embeddings, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, num_embeddings - first)
            self.put_rows(first, torch.randn(rows, self.embedding_dim, generator=generator) * INITIAL_STD)

    @torch.no_grad()
    def put_rows(self, first, rows_ND):
        """Set this shard's rows, which are some of rows_ND: the rows first, first + 1, ... of the whole table.

        Must not be called while a trainer trains.
        """
        skip = (self.shard - first) % self.num_shards
        own = rows_ND[skip :: self.num_shards]
        start = (first + skip) // self.num_shards
        self.weight[start : start + len(own)] = own.to(self.weight.device)

    def get_rows(self):
        """Return this shard's rows [N / S, D].  Must not be called while a trainer trains."""
        return self.weight.detach().cpu()

    # ------------------------------------------------------------------------------------------- for the run's summary

    def staleness(self):
        """Return {staleness: number of gradients with it}.  Needs no lock: it only reads."""
        return self.staleness_counter.counts

    def megabytes(self):
        """Return (size of this shard's rows, peak memory of this process), both in 10^6 bytes.

        Needs no lock: it only reads.
        """
        return self.weight.nbytes / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
