"""Mode `pipelined`, the servers' part: a step and the next lookup in one call.

Runs in the server processes, on RPC threads.  The trainers' part is pipelined_trainer.py.
Shapes: B bags in a batch, I ids in a batch, D embedding dimensions.
"""

import threading
from collections import defaultdict, deque

import torch
from torch import optim

import sgd
from embedding_server import EmbeddingShard
from glue.tensors import to_wire

embedding_shard = None  # the PipelinedShard that this process serves


def get_embedding_shard():
    """Return the PipelinedShard that this process serves."""
    return embedding_shard


class PipelinedShard(EmbeddingShard):
    """An EmbeddingShard that keeps the graph of each lookup until its gradient comes, and steps its rows by itself."""

    def __init__(self, *args, **kwargs):
        global embedding_shard
        super().__init__(*args, **kwargs)
        self.optimizer = optim.SGD(self.parameters(), lr=0.0)  # the rate is set before each epoch
        self.lock = threading.Lock()  # guards the optimizer and weight.grad
        self.lookups = defaultdict(deque)  # trainer -> its bag sums [B, D] that still wait for their gradient
        embedding_shard = self  # there is one in each server

    def set_learning_rate(self, lr):
        """Set the learning rate.  Needs no lock: one trainer calls it, while no trainer trains."""
        sgd.set_learning_rate(self.optimizer, lr)


def exchange(trainer, gradient_BD, ids_I, offsets_B):
    """Step with the gradient of an earlier lookup, then look up the next batch: one round trip for both.

    gradient_BD belongs to `trainer`'s oldest lookup that has none yet; None where there is none to give.  ids_I is
    None where there is nothing more to look up.  Return the sums [B, D], or None.  All come and go as inline() makes
    them.  Plain autograd on this side: the graph of a lookup waits here for its gradient, so neither ids nor rows
    travel twice.  Different trainers call this at once (the step is locked), one trainer never does.

    A function that is called by its name, and no method that is called through the RRef, because it is faster: handing
    an RRef to its owner costs further messages, for the reference count, each time.
    """
    shard = get_embedding_shard()
    waiting = shard.lookups[trainer]
    if gradient_BD is not None:
        with shard.lock:
            waiting.popleft().backward(unpacked(gradient_BD).to(shard.weight.device))
            shard.optimizer.step()
            shard.optimizer.zero_grad()
    if ids_I is None:
        return None
    sums_BD = shard(unpacked(ids_I), unpacked(offsets_B))
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
