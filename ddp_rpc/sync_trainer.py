"""Mode `sync`, the tutorial's mode: one training step of a trainer.

Runs in the trainer processes, on the RPC thread that runs _run_trainer.  The servers' part is EmbeddingShard.look_up.
The backward pass and the optimizer step also run on the servers; torch does this, without further code of this package.
Shapes: B bags in a batch, I ids in a batch, C classes.
"""

import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from embedding_server import EmbeddingShard
from sgd import SGD, set_distributed_learning_rate


class SyncTraining:
    """Each trainer updates the shared table with its own gradient, right after its own backward pass (Hogwild).

    In one training step of T trainers, a row of the table gets up to T updates, each with the full learning rate.
    `fc` gets one update, with the mean of T gradients.  So the table learns with T times the learning rate of `fc`.
    """

    shard_class = EmbeddingShard  # the class of the table's parts on the servers in this mode

    def __init__(self, model, lr):
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        # DistributedOptimizer needs an RRef to each parameter: to those of the table, and also to those of fc, which
        # are in this process.
        parameter_rrefs = []
        for emb_rref in model.emb_rrefs:
            parameter_rrefs += emb_rref.rpc_sync().retrieve_embedding_parameters()
        parameter_rrefs += [rpc.RRef(parameter) for parameter in model.parameters()]
        # It makes one SGD optimizer in each process that owns parameters, and calls each of them by RPC, also the one
        # in this process.
        self.opt = DistributedOptimizer(SGD, parameter_rrefs, lr=lr)

    def set_learning_rate(self, lr):
        """Set the learning rate of this trainer's optimizers, in this process and on the servers."""
        set_distributed_learning_rate(self.opt, lr)

    def step(self, batch, next_batch):
        """Train on one batch (ids [I], offsets [B], target [B]); return its loss, a tensor on this trainer's device.

        `next_batch` is not used: only mode `pipelined` needs it.
        """
        ids_I, offsets_B, target_B = batch
        # Each batch has a context of its own.  The gradients are kept in the context, not in .grad, so there is no
        # zero_grad().  On the servers, the contexts also keep the gradients of different trainers apart.
        with dist_autograd.context() as context_id:
            logits_BC = self.model(ids_I, offsets_B)
            loss = self.criterion(logits_BC, target_B.to(self.model.device))
            # Backward through fc, where DDP averages the gradients of all trainers; then through the lookups, on the
            # servers.
            dist_autograd.backward(context_id, [loss])
            self.opt.step(context_id)
        return loss.detach()
