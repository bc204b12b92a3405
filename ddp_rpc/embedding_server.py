"""The embedding table: what lives on the parameter servers, and what trainers and master may ask of it over RPC.

Runs in the server processes, on RPC threads: each request on a thread of its own, several at once.  The servers have no
loop; they create their shard when the master asks for it (rpc.remote) and answer until everybody is done.

Row i of the table lives on server i % S, there as row i // S.  A bag's ids may lie on all servers; each sums up the
rows that it has, and because the mode is "sum" the trainer gets the whole bag's sum by adding up the servers' parts.

Shapes: B bags in a batch, I ids in a batch, N rows of the table, S servers (shards), D embedding dimensions.
"""

import resource
import threading
from collections import Counter, defaultdict, deque
from functools import reduce

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.nn import functional as F

from glue.placement import to_wire

# nn.EmbeddingBag starts with N(0, 1): so large against a step of lr 0.05 that the rows would take for ever to learn.
INITIAL_STD = 0.1
BLOCK_ROWS = 65536


class EmbeddingShard(nn.EmbeddingBag):
    """The rows of one server: an nn.EmbeddingBag(mode="sum") that answers trainers, several at once."""

    def __init__(self, shard, num_shards, num_embeddings, embedding_dim, *, num_trainers, lr, sparse, seed, device):
        """Make shard number `shard` of `num_shards` of a table [num_embeddings, embedding_dim]; `device` is a string.

        `lr` is for the modes whose servers step by themselves; `seed` gives the whole table's first values.
        """
        num_rows = len(range(shard, num_embeddings, num_shards))
        super().__init__(num_rows, embedding_dim, mode="sum", sparse=sparse, device=device)
        EmbeddingShard.of_this_process = self  # there is one in each server; exchange() finds it without an RRef
        self.shard, self.num_shards, self.num_trainers = shard, num_shards, num_trainers
        self.optimizer = optim.SGD(self.parameters(), lr=lr)  # for the modes without DistributedOptimizer
        self.lock = threading.Lock()  # guards the optimizer, weight.grad, and:
        self.averaging = {}  # trainer -> its gradient, of those that have come so far in mode `averaged`
        self.averaged = torch.futures.Future()  # what these trainers wait for
        self.lookups = defaultdict(deque)  # trainer -> its bag sums [B, D] that still wait for their gradient
        self.stale, self.counting = Counter(), threading.Lock()  # staleness -> how many gradients; and its guard
        # Every server draws the whole table, but keeps only its own rows, block by block: the start does not depend
        # on the number of servers, and no server ever holds more than its share.
        generator = torch.Generator().manual_seed(seed)
        for first in range(0, num_embeddings, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, num_embeddings - first)
            self.put_rows(first, torch.randn(rows, embedding_dim, generator=generator) * INITIAL_STD)

    def forward(self, ids_I, offsets_B):
        """Return the sums [B, D] of this shard's rows, bag by bag, as they travel; an empty bag gives zeros."""
        return to_wire(self.look_up(ids_I, offsets_B))

    def look_up(self, ids_I, offsets_B):
        """Return the sums [B, D] where the table is.

        Needs no lock: it reads rows that other trainers may be stepping at this moment, and may see some of them
        before and some after the step.  That is Hogwild (Niu et al. 2011), and what the tutorial does too.
        """
        device = self.weight.device
        sums_BD = super().forward(ids_I.to(device), offsets_B.to(device))
        if sums_BD.requires_grad:  # not in an evaluation, see lookup()
            before = self.weight._version  # torch counts the changes of every tensor's values
            sums_BD.register_hook(lambda _: self.count_staleness(self.weight._version - before))
        return sums_BD

    def count_staleness(self, steps):
        """Note that a lookup's gradient has come so many steps of this table after the lookup.  Locked."""
        with self.counting:
            self.stale[steps] += 1

    def staleness(self):
        """Return {staleness: how many gradients had it}.  Reads only."""
        return self.stale

    # ------------------------------------------------------------------------------ for the master, between epochs

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

    def megabytes(self):
        """Return (this shard's table, the peak of this process's memory), both in 10^6 bytes.  Reads only."""
        return self.weight.nbytes / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def split_by_shard(ids_I, offsets_B, num_shards):
    """Split one batch into a list of (ids, offsets) for each shard: B bags each, some of them empty (a trainer's part).

    The ids that a shard gets are its own row numbers; ids_I and offsets_B are int64 as nn.EmbeddingBag takes them.
    """
    if num_shards == 1:
        return [(ids_I, offsets_B)]
    shard_I, row_I = ids_I % num_shards, ids_I // num_shards
    parts = []
    for shard in range(num_shards):
        mine_I = shard_I == shard
        # Where a bag began after k ids, its part begins after as many of those k ids as are this shard's.
        mine_before = F.pad(mine_I.cumsum(0), (1, 0))
        parts.append((row_I[mine_I], mine_before[offsets_B]))
    return parts


# What the trainers call, mode by mode.  rref.rpc_sync().method() would do for most of it, but not where speed counts:
# rref.rpc_async() asks for the RRef's type first, the first time from a thread that knows nothing of the caller's
# dist_autograd context.

# --------------------------------------------------------------------------------------------------------------- sync


def lookup(shard_rref, ids_I, offsets_B, with_gradient):
    """Return the bag sums [B, D] of a shard; inside a dist_autograd context, backward will find its way back here.

    `with_gradient` is False where no gradient will come, as in an evaluation: then no graph is built.  The trainer must
    say so, because its torch.no_grad() holds for its own thread, and does not reach this process.
    """
    with torch.set_grad_enabled(with_gradient):
        return shard_rref.local_value()(ids_I, offsets_B)


def _retrieve_embedding_parameters(shard_rref):
    """Return an RRef to each parameter of a shard, for DistributedOptimizer (the tutorial's function)."""
    return [rpc.RRef(parameter) for parameter in shard_rref.local_value().parameters()]


# ----------------------------------------------------------------------------------------------------------- averaged


@rpc.functions.async_execution  # the answer goes out when the Future is complete; no server thread waits for it
def average_and_step(shard_rref, trainer, context_id):
    """Take one trainer's gradient; when all have come, step once with their mean.  Return a Future of that step.

    `trainer` is its number; `context_id` is the dist_autograd context in which it has run backward: its gradient is
    here already.  All trainers call this at once; locked.  Nobody looks rows up meanwhile: all of them wait for this
    step.
    """
    shard = shard_rref.local_value()
    gradient = dist_autograd.get_gradients(context_id)[shard.weight]
    with shard.lock:
        shard.averaging[trainer] = gradient
        done = shard.averaged
        complete = len(shard.averaging) == shard.num_trainers
        if complete:
            shard.weight.grad = mean_of(shard.averaging)
            shard.optimizer.step()
            shard.averaging, shard.averaged = {}, torch.futures.Future()
    if complete:
        done.set_result(None)  # outside the lock: this sends the answers to all the trainers that wait
    return done


def mean_of(gradients):
    """Return the mean of {trainer: gradient}, whose last bits do not depend on the order of the trainers' calls.

    Floating-point sums depend on their order, so it is that of the trainers' numbers.
    """
    total = reduce(torch.add, [gradients[trainer] for trainer in sorted(gradients)])
    if total.is_sparse:
        # An id may stand in it several times.  coalesce() adds these up in a fixed order; the optimizer on a GPU, in
        # whatever order they come.
        total = total.coalesce()
    return total / len(gradients)


# ---------------------------------------------------------------------------------------------------------- pipelined


def exchange(trainer, gradient_BD, ids_I, offsets_B):
    """Step with the gradient of an earlier lookup, then look up the next batch: one round trip for both.

    gradient_BD belongs to `trainer`'s oldest lookup that has none yet; None where there is none to give.  ids_I is
    None where there is nothing more to look up.  Return the sums [B, D], or None.  All come and go as inline() makes
    them.  Plain autograd on this side: the graph of a lookup waits here for its gradient, so neither ids nor rows
    travel twice.  Different trainers call this at once (the step is locked), one trainer never does.

    No RRef says which shard: handing one to its owner costs further messages, for the reference count, each time.
    """
    shard = EmbeddingShard.of_this_process
    waiting = shard.lookups[trainer]
    if gradient_BD is not None:
        with shard.lock:
            waiting.popleft().backward(unpacked(gradient_BD).to(shard.weight.device))
            shard.optimizer.step()
            shard.optimizer.zero_grad()
    if ids_I is None:
        return None
    sums_BD = shard.look_up(unpacked(ids_I), unpacked(offsets_B))
    waiting.append(sums_BD)
    return inline(sums_BD.detach())


def inline(tensor):
    """Prepare a tensor (or None) for a fast trip: pickled into the message itself, as a numpy array.

    RPC sends each tensor as a part of its own beside the message: for small ones that costs more than all the rest.
    """
    return None if tensor is None else to_wire(tensor).numpy()


def unpacked(array):
    """Return the tensor that inline() prepared."""
    return torch.as_tensor(array)
