"""Mode `averaged`: `sync`, but each server steps once for all trainers, with the mean of their gradients.

Runs in the trainer processes, on the RPC thread of _run_trainer.  The servers' part is averaged_server.py.
Shapes: B bags in a batch, I ids in a batch, C classes.
"""

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from averaged_server import AveragingShard
from sgd import SGD, set_distributed_learning_rate


class AveragedTraining:
    """The servers do with the table's gradients what DDP does with those of `fc`.

    T trainers then compute what one process computes on the T batches joined: the same rate for both parts.
    """

    shard_class = AveragingShard  # what the servers make for this mode

    def __init__(self, model, lr):
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        parameter_rrefs = [rpc.RRef(parameter) for parameter in model.parameters()]  # of fc; each server steps its rows
        self.opt = DistributedOptimizer(SGD, parameter_rrefs, lr=lr)

    def set_learning_rate(self, lr):
        """Set the learning rate, here and (one trainer for all) on the servers.  A barrier must follow."""
        set_distributed_learning_rate(self.opt, lr)
        if dist.get_rank() == 0:
            for emb_rref in self.model.emb_rrefs:
                emb_rref.rpc_sync().set_learning_rate(lr)

    def step(self, batch, next_batch):
        """Train on one batch (ids [I], offsets [B], target [B]); return its loss, a tensor on this trainer's device.

        `next_batch` is for mode `pipelined`.
        """
        ids_I, offsets_B, target_B = batch
        with dist_autograd.context() as context_id:
            logits_BC = self.model(ids_I, offsets_B)
            loss = self.criterion(logits_BC, target_B.to(self.model.device))
            dist_autograd.backward(context_id, [loss])
            # Each server answers when it has stepped, which is when the last trainer has called.
            table_steps = [
                emb_rref.rpc_async().average_and_step(dist.get_rank(), dist.get_world_size(), context_id)
                for emb_rref in self.model.emb_rrefs
            ]
            self.opt.step(context_id)
            torch.futures.wait_all(table_steps)
        return loss.detach()
