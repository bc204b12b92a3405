"""The embedding table: what lives on the parameter servers, and what trainers and master may ask of it over RPC.

Runs in the server processes, on RPC threads: each request on a thread of its own, several at once.  The servers have no
loop; they create their shard when the master asks for it (rpc.remote) and answer until everybody is done.

Row i of the table lives on server i % S, there as row i // S.  A bag's ids may lie on all servers; each sums up the
rows that it has, and because the mode is "sum" the trainer gets the whole bag's sum by adding up the servers' parts.

Shapes: B bags in a batch, I ids in a batch, N rows of the table, S servers (shards), D embedding dimensions.
"""

import resource
import threading
from collections import defaultdict, deque
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


def split_by_shard(ids_I, offsets_B, num_shards):
    """Split one batch into a list of (ids, offsets) for each shard: B bags each, some of them empty.

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


class EmbeddingShard(nn.EmbeddingBag):
    """The rows of one server: an nn.EmbeddingBag(mode="sum") with the remotely called methods beside it."""

    of_this_process = None  # there is one shard in each server; exchange() below finds it without an RRef

    def __init__(self, shard, num_shards, num_trainers, args, device, seed):
        """Make shard number `shard` of `num_shards`; `device` is a string, `args` the command line's."""
        num_rows = len(range(shard, args.num_embeddings, num_shards))
        super().__init__(num_rows, args.embedding_dim, mode="sum", sparse=args.sparse, device=device)
        EmbeddingShard.of_this_process = self
        self.shard, self.num_shards, self.num_trainers = shard, num_shards, num_trainers
        self.optimizer = optim.SGD(self.parameters(), lr=args.lr)  # for the modes without DistributedOptimizer
        self.lock = threading.Lock()  # guards the three below, weight.grad and the optimizer
        self.averaging, self.averaged = [], torch.futures.Future()
        self.lookups = defaultdict(deque)  # trainer -> its bag sums [B, D] that still wait for their gradient
        # Every server draws the whole table, but keeps only its own rows, block by block: the start does not depend
        # on the number of servers, and no server ever holds more than its share.
        generator = torch.Generator().manual_seed(seed)
        for first in range(0, args.num_embeddings, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, args.num_embeddings)
            block = torch.randn(last - first, args.embedding_dim, generator=generator) * INITIAL_STD
            self.put_rows(first, block)

    # ------------------------------------------------------------------ all modes

    def forward(self, ids_I, offsets_B):
        """Return the sums [B, D] of this shard's rows, bag by bag; an empty bag gives zeros.

        Needs no lock: it reads rows that other trainers may be stepping at this moment, and may see some of them
        before and some after the step.  That is Hogwild (Niu et al. 2011), and what the tutorial does too.
        """
        device = self.weight.device
        sums_BD = super().forward(ids_I.to(device), offsets_B.to(device))
        return to_wire(sums_BD)

    def set_training(self, training):
        """Switch to train or eval mode (of no effect on a sum; on dropout, say).  Called while nobody trains."""
        self.train(training)  # its result is self: returned, the whole table would travel

    # ------------------------------------------------------------------ mode averaged

    def average_and_step(self, context_id):
        """Take one trainer's gradient; when all have come, step once with their mean.  Returns a Future of that step.

        `context_id` is the dist_autograd context in which the trainer has run backward: its gradient is here already.
        All trainers call this at once; locked.  Nobody looks rows up meanwhile: all of them wait for this step.
        """
        gradient = dist_autograd.get_gradients(context_id)[self.weight]
        with self.lock:
            self.averaging.append(gradient)
            done = self.averaged
            complete = len(self.averaging) == self.num_trainers
            if complete:
                self.weight.grad = reduce(torch.add, self.averaging) / self.num_trainers
                self.optimizer.step()
                self.averaging, self.averaged = [], torch.futures.Future()
        if complete:
            done.set_result(None)  # outside the lock: this sends the answers to all the trainers that wait
        return done

    # ------------------------------------------------------------------ mode pipelined

    def exchange(self, trainer, gradient_BD, ids_I, offsets_B):
        """Step with the gradient of an earlier lookup, then look up the next batch: one round trip for both.

        gradient_BD belongs to `trainer`'s oldest lookup that has none yet; None where there is none to give.  ids_I is
        None where there is nothing more to look up.  Returns the sums [B, D], or None.  Plain autograd on this side:
        the graph of a lookup waits here for its gradient, so neither ids nor rows travel twice.
        Different trainers call it at once (the step is locked), one trainer never does.
        """
        waiting = self.lookups[trainer]
        if gradient_BD is not None:
            with self.lock:
                waiting.popleft().backward(gradient_BD.to(self.weight.device))
                self.optimizer.step()
                self.optimizer.zero_grad()
        if ids_I is None:
            return None
        sums_BD = self(ids_I, offsets_B)
        waiting.append(sums_BD)
        return sums_BD.detach()

    # ------------------------------------------------------------------ for the master, between epochs

    @torch.no_grad()
    def put_rows(self, first, rows_ND):
        """Take this shard's own out of rows first, first + 1, ... of the whole table.  Not while anybody trains."""
        skip = (self.shard - first) % self.num_shards
        own = rows_ND[skip :: self.num_shards]
        start = (first + skip) // self.num_shards
        self.weight[start : start + len(own)] = own

    def get_rows(self):
        """Return this shard's rows [N / S, D] on the CPU.  Not while anybody trains."""
        return self.weight.detach().cpu()

    def megabytes(self):
        """Return (this shard's table, the peak of this process's memory), both in 10^6 bytes.  Reads only."""
        return self.weight.nbytes / 1e6, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


# What the trainers call.  rref.rpc_sync().method() would do for most of it, but not where speed counts:
# rref.rpc_async() asks for the RRef's type first, the first time from a thread that knows nothing of the caller's
# dist_autograd context, and wraps the answer in a Future that cannot hold CUDA tensors.


def lookup(shard_rref, ids_I, offsets_B):
    """Return the bag sums [B, D] of a shard; inside a dist_autograd context, backward will find its way back here."""
    return shard_rref.local_value()(ids_I, offsets_B)


def inline(tensor):
    """Prepare a tensor (or None) for a fast trip: pickled into the message itself, as a numpy array.

    RPC sends each tensor as a part of its own beside the message: for small ones that costs more than all the rest.
    CUDA tensors travel as they are.
    """
    return tensor.numpy() if tensor is not None and tensor.device.type == "cpu" else tensor


def unpacked(array):
    """Return the tensor (or None) that inline() prepared."""
    return array if array is None else torch.as_tensor(array)


def exchange(trainer, *arrays):
    """See EmbeddingShard.exchange; tensors come and go as inline() prepares them.

    No RRef says which shard: handing one to its owner costs further messages, for the reference count, each time.
    """
    return inline(EmbeddingShard.of_this_process.exchange(trainer, *map(unpacked, arrays)))


@rpc.functions.async_execution  # the answer goes out when the Future is complete; no server thread waits for it
def average_and_step(shard_rref, context_id):
    """See EmbeddingShard.average_and_step."""
    return shard_rref.local_value().average_and_step(context_id)


def retrieve_embedding_parameters(shard_rref):
    """Return an RRef to each parameter of a shard, for DistributedOptimizer (the tutorial's function)."""
    return [rpc.RRef(parameter) for parameter in shard_rref.local_value().parameters()]
