"""The model: an embedding table on the servers, and a linear layer `fc` in every trainer.

Runs in the trainer processes.
Shapes: B bags in a batch, I ids in a batch, D embedding dimensions, C classes, T trainers, P parameters of `fc`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from clicks import NUM_CLASSES


class HybridModel(nn.Module):
    """A sparse part, the table on the servers (`emb_rrefs`: an RRef for each), and a dense part, `fc`, wrapped in DDP.

    It follows the tutorial's HybridModel.  `parameters()` returns only those of `fc`, because the table is in other
    processes.
    """

    def __init__(self, emb_rrefs, embedding_dim, device):
        super().__init__()
        self.emb_rrefs = emb_rrefs
        self.device = device
        for emb_rref in emb_rrefs:
            # This returns when the server has made its part of the table.  The first call through an RRef must be
            # synchronous, because torch first asks the owner for the type of the object.  If the first call were
            # asynchronous, the thread that receives this type would send it.  That thread is not in the
            # dist_autograd context of this thread, so no gradient would flow through the call, and torch would
            # report no error.
            emb_rref.rpc_sync(timeout=0).ready()
        fc = nn.Linear(embedding_dim, NUM_CLASSES)
        for tensor in fc.state_dict().values():
            # All trainers start with the values of trainer 0.  DDP can do this, too, but it would send them from
            # `device`.  This line and the hook below send values only from the CPU.  DDP itself still broadcasts a few
            # integers (the order of its buckets, at the second forward pass) on `device`: from reading torch's
            # reducer.cpp, not from a run on a GPU.
            dist.broadcast(tensor, src=0)
        # DDP averages the gradients of all trainers in each backward pass.  The hook does it on the CPU.
        self.fc = DDP(fc.to(device), init_sync=False)
        self.fc.register_comm_hook(None, gather_and_average)

    def forward(self, ids_I, offsets_B):
        """Return the logits [B, C] of a batch of bags.

        The ids [I] and offsets [B] are those of nn.EmbeddingBag, on the CPU.
        """
        parts = split_by_shard(ids_I, offsets_B, len(self.emb_rrefs))
        # First send the calls to all servers, and then wait: so the servers work at the same time.
        lookups = []
        for emb_rref, (part_ids, part_offsets) in zip(self.emb_rrefs, parts, strict=True):
            lookups.append(emb_rref.rpc_async().look_up(part_ids, part_offsets, torch.is_grad_enabled()))
        return self.fc(self.add_up([lookup.wait() for lookup in lookups]))

    def add_up(self, parts_BD):
        """Add up the servers' partial sums [B, D]; return the sums [B, D] of whole bags on this trainer's device."""
        return sum(part_BD.to(self.device) for part_BD in parts_BD)

    def set_table_learning_rate(self, lr):
        """Set the learning rate of the servers' own optimizers (SteppingShard).  Only trainer 0 sends it."""
        if dist.get_rank() == 0:
            for emb_rref in self.emb_rrefs:
                emb_rref.rpc_sync().set_learning_rate(lr)


# ------------------------------------------------------------------------------------------------- several servers


def split_by_shard(ids_I, offsets_B, num_shards):
    """Split one batch into a list of (ids, offsets), one pair for each shard.

    Each pair has B bags, of which some may be empty.  Its ids are row numbers within the shard.  ids_I and offsets_B
    are int64 tensors, as for nn.EmbeddingBag.
    """
    if num_shards == 1:
        return [(ids_I, offsets_B)]
    shard_I = ids_I % num_shards
    row_I = ids_I // num_shards
    parts = []
    for shard in range(num_shards):
        mine_I = shard_I == shard
        # A bag begins after k ids of the batch.  If this shard has m of these k ids, the bag begins after m ids in
        # this shard's part.
        mine_before = F.pad(mine_I.cumsum(0), (1, 0))
        parts.append((row_I[mine_I], mine_before[offsets_B]))
    return parts


# --------------------------------------------------------------------------------------------- DDP with fewer messages


def gather_and_average(_, bucket):
    """A DDP communication hook: each trainer gathers the gradients [P] of all trainers and averages them on the CPU.

    DDP would use Gloo's allreduce, which sends pieces of the gradients around a ring of the trainers twice.  This is
    good for megabytes.  `fc` has only 136 numbers, so the time depends on the number of messages, and a gather needs
    fewer.  All trainers add in the same order, so their replicas stay identical.  (For large models on GPUs with a fast
    connection, use NCCL's allreduce, without a hook.)
    """
    gradients_P = bucket.buffer()
    own_P = gradients_P.cpu()
    all_TP = own_P.new_empty(dist.get_world_size(), len(own_P))
    dist.all_gather(list(all_TP), own_P)  # blocks; fc has only one bucket of gradients, so nothing else could run
    device = gradients_P.device
    averaged = torch.futures.Future(devices=None if device.type == "cpu" else [device])
    averaged.set_result(all_TP.mean(dim=0).to(device))
    return averaged
