"""Mode `pipelined`, the servers' part: an update and the next lookup in one call.

Runs in the server processes, on RPC threads.  The trainers' part is pipelined_trainer.py.
Shapes: B bags in a batch, I ids in a batch, D embedding dimensions.
"""

from collections import defaultdict, deque

import torch

from stepping_server import SteppingShard

embedding_shard = None  # the PipelinedShard of this process; a server has exactly one


def get_embedding_shard():
    """Return the PipelinedShard of this process."""
    return embedding_shard


class PipelinedShard(SteppingShard):
    """A SteppingShard that keeps the autograd graph of each lookup until the gradient of the lookup arrives."""

    def __init__(self, *args, **kwargs):
        global embedding_shard
        super().__init__(*args, **kwargs)
        self.lookups = defaultdict(deque)  # trainer -> its sums [B, D] that wait for their gradients, the oldest first
        embedding_shard = self


def exchange(trainer, gradient_BD, ids_I, offsets_B):
    """Make an update with the gradient of an earlier lookup, then look up the next batch.  Return the sums [B, D].

    gradient_BD [B, D] is the gradient of the oldest lookup of `trainer` that still waits for its gradient.  It is None
    in the first two calls of an epoch.  ids_I and offsets_B are None in the last two; then this returns None.
    gradient_BD, ids_I, offsets_B and the result are numpy arrays, made by inline().

    The server keeps the autograd graph of each lookup until its gradient arrives, so the ids need not be sent again.
    Different trainers may call this at the same time, and a lock protects the update.  One trainer has only one call at
    a time.

    Trainers call this function by its name, not as a method through the RRef.  This is faster, because a call through
    an RRef sends the RRef as an argument, which costs two further messages each time.
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
    """Return a tensor as a numpy array, which is faster to send; return None for None.

    RPC sends each tensor separately from the message.  With small tensors this takes more time than everything else.
    A numpy array is pickled into the message itself.
    """
    return None if tensor is None else tensor.cpu().numpy()


def unpacked(array):
    """Return the tensor for an array that inline() made."""
    return torch.as_tensor(array)
