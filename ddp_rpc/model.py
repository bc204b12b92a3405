"""The model: embeddings on the servers, a linear layer in every trainer (runs in the trainer processes).

Shapes: B bags in a batch, I ids in a batch, D embedding dimensions, C classes, T trainers, P parameters of `fc`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from clicks import NUM_CLASSES
from glue.tensors import to_wire


class HybridModel(nn.Module):
    """A sparse part behind RRefs (`emb_rrefs`, one for each server) and a dense part, `fc`, replicated by DDP.

    Follows the tutorial's HybridModel.  `parameters()` are those of `fc` alone: the table is not here.
    """

    def __init__(self, emb_rrefs, embedding_dim, device):
        super().__init__()
        self.emb_rrefs = emb_rrefs
        self.device = device
        for emb_rref in emb_rrefs:
            # Returns when the server has made its part of the table.  The first call must be a synchronous one: before
            # it, an RRef asks its owner for the type of its object.  An asynchronous call is then sent by the thread
            # that gets the answer, which is not in the caller's dist_autograd context.
            emb_rref.rpc_sync(timeout=0).ready()
        fc = nn.Linear(embedding_dim, NUM_CLASSES)
        for tensor in fc.state_dict().values():
            dist.broadcast(tensor, src=0)  # the first trainer's values: DDP would do this as well, but on `device`
        # DDP averages the gradients of all trainers in every backward, here by way of the CPU.
        self.fc = DDP(fc.to(device), init_sync=False)
        self.fc.register_comm_hook(None, gather_and_average)

    def forward(self, ids_I, offsets_B):
        """Return the logits [B, C] of a batch of bags (ids and offsets on the CPU, as nn.EmbeddingBag takes them)."""
        parts = split_by_shard(ids_I, offsets_B, len(self.emb_rrefs))
        # All servers at once: the lookup takes as long as the slowest of them, not as long as all together.
        lookups = []
        for emb_rref, (part_ids, part_offsets) in zip(self.emb_rrefs, parts, strict=True):
            lookups.append(emb_rref.rpc_async().look_up(part_ids, part_offsets, torch.is_grad_enabled()))
        return self.fc(self.add_up([lookup.wait() for lookup in lookups]))

    def add_up(self, parts_BD):
        """Return the whole bags' sums [B, D] on this trainer's device, from the servers' partial sums [B, D]."""
        return sum(part_BD.to(self.device) for part_BD in parts_BD)


# ------------------------------------------------------------------------------------------------- several servers


def split_by_shard(ids_I, offsets_B, num_shards):
    """Split one batch into a list of (ids, offsets) for each shard: B bags each, some of them empty.

    The ids that a shard gets are its own row numbers; ids_I and offsets_B are int64 as nn.EmbeddingBag takes them.
    """
    if num_shards == 1:
        return [(ids_I, offsets_B)]
    shard_I = ids_I % num_shards
    row_I = ids_I // num_shards
    parts = []
    for shard in range(num_shards):
        mine_I = shard_I == shard
        # Where a bag began after k ids, its part begins after as many of those k ids as are this shard's.
        mine_before = F.pad(mine_I.cumsum(0), (1, 0))
        parts.append((row_I[mine_I], mine_before[offsets_B]))
    return parts


# --------------------------------------------------------------------------------------------- DDP with fewer messages


def gather_and_average(_, bucket):
    """DDP communication hook: every trainer gathers all trainers' gradients [P] and averages them itself, on the CPU.

    Gloo's allreduce goes around the ring twice, in pieces: right for megabytes, but for the 136 numbers of `fc` what
    counts is the number of messages, and a gather needs fewer.  All trainers add in the same order, so their replicas
    stay identical.  (For large models on GPUs that have a fast link, NCCL's allreduce is the choice, without a hook.)
    """
    gradients_P = bucket.buffer()
    own_P = to_wire(gradients_P)
    all_TP = own_P.new_empty(dist.get_world_size(), len(own_P))
    dist.all_gather(list(all_TP), own_P)  # waits: fc has one bucket, so there is nothing else to do
    device = gradients_P.device
    averaged = torch.futures.Future(devices=None if device.type == "cpu" else [device])
    averaged.set_result(all_TP.mean(dim=0).to(device))
    return averaged
