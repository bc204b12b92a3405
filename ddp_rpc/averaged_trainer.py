"""Mode `averaged`: like `sync`, but each server makes one update for all trainers, with the mean of their gradients.

Runs in the trainer processes, on the RPC thread that runs _run_trainer.  The servers' part is averaged_server.py.
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
    """The servers average the table's gradients over all trainers, as DDP averages those of `fc`.

    So T trainers compute the same as one process that trains on their T batches joined into one.  The table and `fc`
    learn with the same learning rate.
    """

    shard_class = AveragingShard  # the class of the table's parts on the servers in this mode

    def __init__(self, model, lr):
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        # This optimizer has only the parameters of fc.  Each server has an optimizer of its own for its rows.
        parameter_rrefs = [rpc.RRef(parameter) for parameter in model.parameters()]
        self.opt = DistributedOptimizer(SGD, parameter_rrefs, lr=lr)

    def set_learning_rate(self, lr):
        """Set the learning rate of `fc` in this process; trainer 0 also sets that of the servers.

        A barrier must follow, so that no trainer trains before the servers have the new rate.
        """
        set_distributed_learning_rate(self.opt, lr)
        self.model.set_table_learning_rate(lr)

    def step(self, batch, next_batch):
        """Train on one batch (ids [I], offsets [B], target [B]); return its loss, a tensor on this trainer's device.

        `next_batch` is not used: only mode `pipelined` needs it.
        """
        ids_I, offsets_B, target_B = batch
        with dist_autograd.context() as context_id:
            logits_BC = self.model(ids_I, offsets_B)
            loss = self.criterion(logits_BC, target_B.to(self.model.device))
            dist_autograd.backward(context_id, [loss])
            # A server answers after its update, and it makes the update when the last trainer has called.
            table_steps = [
                emb_rref.rpc_async().average_and_step(dist.get_rank(), dist.get_world_size(), context_id)
                for emb_rref in self.model.emb_rrefs
            ]
            self.opt.step(context_id)
            torch.futures.wait_all(table_steps)
        return loss.detach()
