"""Mode `hogwild`, the tutorial's: each trainer updates the table with its own gradient, as soon as it has it.

The model has two parts: a large, sparse table of embeddings, on the servers, and a small, dense layer, `fc`, of which
each trainer has a replica. A training step begins with Trainer.step. Its forward pass calls EmbeddingShard.look_up on
the servers. The backward pass and the optimizer make calls of their own, from inside torch. `sync` is this mode with
one idea more. `pipelined` trains in another way, with the model and the lookup of this file.

Shapes: B bags in a batch, I ids in a batch, D embedding dimensions, C classes.
"""

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import trainer
from clicks import NUM_CLASSES
from shards import Shard, split_by_shard


class Trainer(trainer.Trainer):  # in a trainer
    """Trains on batches. The table gets an update from each of T trainers at the full rate, `fc` one with the mean.

    So the table learns at T times the rate of `fc`.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # DistributedOptimizer needs an RRef to each parameter: of the table, and also of fc, which is in this process.
        self.parameter_rrefs = [rpc.RRef(parameter) for parameter in self.model.parameters()]
        for emb_rref in self.emb_rrefs:
            # This waits until the server has made its shard. It also makes the calls of look_up safe: a *first* call
            # through an RRef by rpc_async would be outside of the autograd context, without gradients or an error
            # (docs/CONCEPTS.md, RRefs).
            self.parameter_rrefs += emb_rref.rpc_sync(timeout=0).parameter_rrefs()

    def make_model(self):
        return HybridModel(self.emb_rrefs, self.plan.embedding_dim, self.device)

    def set_learning_rate(self, lr):
        """Set the learning rate of an epoch."""
        # A DistributedOptimizer makes one SGD in each process that owns parameters. It has no method that
        # changes their learning rate. But SGD without momentum remembers nothing, so new ones are as good.
        self.opt = DistributedOptimizer(SGD, self.parameter_rrefs, lr=lr)

    def step(self, batch):
        """Train on one batch; return its loss. Source: tutorial, _run_trainer."""
        ids_I, offsets_B, target_B = batch
        # Each step has a context of its own, which keeps its gradients; the optimizer puts them in the place of the old
        # ones, so there is no zero_grad(). On the servers the contexts keep the trainers' gradients apart.
        with dist_autograd.context() as context_id:
            logits_BC = self.model(ids_I, offsets_B)
            loss = F.cross_entropy(logits_BC, target_B.to(self.device))
            # Through fc, where DDP averages the gradients of all trainers, and then through the lookup on the servers.
            dist_autograd.backward(context_id, [loss])
            # An RPC to each process that owns parameters: each server, and also this trainer.
            self.opt.step(context_id)
        return loss.detach()


class HybridModel(nn.Module):  # in a trainer
    """Source: tutorial, HybridModel. `emb_rrefs`: RRefs to the servers' EmbeddingShards.

    parameters() returns those of `fc`, because the table is in other processes.
    """

    def __init__(self, emb_rrefs, embedding_dim, device):
        super().__init__()
        self.emb_rrefs = emb_rrefs
        self.device = device
        # DDP sends the first values of trainer1 to all, and averages the gradients in each backward pass.
        self.fc = DDP(nn.Linear(embedding_dim, NUM_CLASSES).to(device))

    def forward(self, ids_I, offsets_B):
        """Return the logits (B, C) of a batch of bags. The ids and offsets are those of nn.EmbeddingBag."""
        parts = split_by_shard(ids_I, offsets_B, len(self.emb_rrefs))  # with one server: the whole batch
        lookups = [
            emb_rref.rpc_async().look_up(part_ids, part_offsets, torch.is_grad_enabled())
            for emb_rref, (part_ids, part_offsets) in zip(self.emb_rrefs, parts, strict=True)
        ]
        sums_BD = sum(lookup.wait() for lookup in lookups)
        return self.fc(sums_BD.to(self.device))


class EmbeddingShard(Shard):  # on a server, on RPC threads
    """The table, or a part of it. shards.py has what is not called in a training step."""

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def look_up(self, ids_I, offsets_B, with_gradient):
        """Return the sums (B, D) of this shard's rows in each bag; the sum of an empty bag is 0.

        `with_gradient` is False in an evaluation: the trainer's own no_grad() has no effect in this process.
        """
        # No lock: while this reads, another trainer's optimizer may change rows. That is Hogwild (Niu et al. 2011).
        device = self.weight.device
        with torch.set_grad_enabled(with_gradient):
            # RPC's CUDA support is beta, so CPU tensors travel. Autograd follows to() and cpu().
            return self(ids_I.to(device), offsets_B.to(device)).cpu()


class SGD(optim.SGD):
    """For optim.SGD itself, torch would use a version that takes no lock (docs/differences/ddp_rpc.md, number 20)."""
