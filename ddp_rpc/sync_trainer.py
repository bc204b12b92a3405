"""Mode `sync`, the tutorial's own: one step of a trainer.

Runs in the trainer processes, on the RPC thread of _run_trainer.  The servers' part is EmbeddingShard.look_up; the
backward pass and the optimizer's step reach the servers without further code of ours.
Shapes: B bags in a batch, I ids in a batch, C classes.
"""

import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from embedding_server import EmbeddingShard
from sgd import SGD, set_distributed_learning_rate


class SyncTraining:
    """Each trainer steps the shared table on its own, right after its own backward (Hogwild).

    With T trainers a row gets up to T steps of the full learning rate while `fc` gets one, with the average of T
    gradients: the sparse part learns with T times the rate of the dense part.
    """

    shard_class = EmbeddingShard  # what the servers make for this mode

    def __init__(self, model, lr):
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        # DistributedOptimizer takes RRefs: to the table's parameters, and to the local ones, which are those of fc.
        parameter_rrefs = []
        for emb_rref in model.emb_rrefs:
            parameter_rrefs += emb_rref.rpc_sync().retrieve_embedding_parameters()
        parameter_rrefs += [rpc.RRef(parameter) for parameter in model.parameters()]
        # It makes an optimizer in every process that owns a parameter, and steps each by RPC: this process's own, too.
        self.opt = DistributedOptimizer(SGD, parameter_rrefs, lr=lr)

    def set_learning_rate(self, lr):
        """Set the learning rate of this trainer's optimizers, here and on the servers."""
        set_distributed_learning_rate(self.opt, lr)

    def step(self, batch, next_batch):
        """Train on one batch (ids [I], offsets [B], target [B]); return its loss, a tensor on this trainer's device.

        `next_batch` is for mode `pipelined`.
        """
        ids_I, offsets_B, target_B = batch
        # A context of its own for each batch keeps the gradients of concurrent backwards apart, also on the servers.
        # They live in it, not in .grad, so there is no zero_grad() here.
        with dist_autograd.context() as context_id:
            logits_BC = self.model(ids_I, offsets_B)
            loss = self.criterion(logits_BC, target_B.to(self.model.device))
            # Through fc (here DDP averages) and through the lookups, on the servers.
            dist_autograd.backward(context_id, [loss])
            self.opt.step(context_id)
        return loss.detach()
