"""The model: embeddings on the servers, a linear layer in every trainer (runs in the trainer processes).

Shapes: B bags in a batch, I ids in a batch, D embedding dimensions, C classes.
"""

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from clicks import NUM_CLASSES
from embedding_server import lookup, split_by_shard


class HybridModel(nn.Module):
    """A sparse part behind RRefs (`emb_rrefs`, one for each server) and a dense part, `fc`, replicated by DDP.

    Follows the tutorial's HybridModel.  `parameters()` are those of `fc` alone: the table is not here.
    """

    def __init__(self, emb_rrefs, embedding_dim, device):
        super().__init__()
        self.emb_rrefs = emb_rrefs
        self.device = device
        # DDP copies the first trainer's parameters to all others now, and averages all gradients in every backward.
        fc = nn.Linear(embedding_dim, NUM_CLASSES).to(device)
        self.fc = DDP(fc, device_ids=[device] if device.type == "cuda" else None)

    def forward(self, ids_I, offsets_B):
        """Return the logits [B, C] of a batch of bags (ids and offsets on the CPU, as nn.EmbeddingBag takes them)."""
        parts = split_by_shard(ids_I, offsets_B, len(self.emb_rrefs))
        # All servers at once: the lookup takes as long as the slowest of them, not as long as all together.
        lookups = [
            rpc.rpc_async(rref.owner(), lookup, args=(rref, *part, torch.is_grad_enabled()))
            for rref, part in zip(self.emb_rrefs, parts, strict=True)
        ]
        return self.fc(self.add_up(part.wait() for part in lookups))

    def add_up(self, parts_BD):
        """Return the whole bags' sums [B, D] on this trainer's device, from the servers' partial sums [B, D]."""
        return sum(part_BD.to(self.device) for part_BD in parts_BD)
