"""Mode `pipelined`: one round trip for each batch, during which the trainer trains the batch before it.

Runs in the trainer processes, on the RPC thread that runs _run_trainer.  The servers' part is pipelined_server.py.
Shapes: B bags in a batch, I ids in a batch, D embedding dimensions, C classes.
"""

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch import nn, optim

import pipelined_server
import sgd
from model import split_by_shard
from pipelined_server import PipelinedShard, inline, unpacked


class PipelinedTraining:
    """One message asks for the sums of batch k + 1 and brings the gradient of batch k - 1.

    It is sent before the trainer trains batch k.  So a lookup misses one of this trainer's own updates, the latest: its
    staleness is one.  (Updates of other trainers add to it.)

    There is no distributed autograd.  In the trainer the sums are a leaf of the graph, and the server continues the
    backward pass with their gradient.  An ordinary optimizer updates `fc`.  This saves the messages of dist_autograd
    and of DistributedOptimizer.
    """

    shard_class = PipelinedShard  # the class of the table's parts on the servers in this mode

    def __init__(self, model, lr):
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        self.opt = optim.SGD(model.parameters(), lr=lr)
        self.coming = None  # the Futures of the next batch's sums, one for each server; None before an epoch
        self.gradient_BD = None  # the gradient of the sums of the previous batch; None before an epoch

    def set_learning_rate(self, lr):
        """Set the learning rate of `fc` in this process; trainer 0 also sets that of the servers.

        A barrier must follow, so that no trainer trains before the servers have the new rate.
        """
        sgd.set_learning_rate(self.opt, lr)
        self.model.set_table_learning_rate(lr)

    def step(self, batch, next_batch):
        """Train on one batch (ids [I], offsets [B], target [B]); return its loss, a tensor on this trainer's device.

        `next_batch` is None in the last training step of an epoch.
        """
        if self.coming is None:
            self.coming = self.exchange(None, batch)
        sums_BD = self.model.add_up([unpacked(part.wait()) for part in self.coming]).requires_grad_()
        self.coming = self.exchange(self.gradient_BD, next_batch)

        logits_BC = self.model.fc(sums_BD)
        loss = self.criterion(logits_BC, batch[2].to(self.model.device))
        loss.backward()  # DDP averages the gradients of fc, but not the gradient of the sums
        self.opt.step()
        self.opt.zero_grad()
        self.gradient_BD = sums_BD.grad
        if next_batch is None:
            self.empty_pipe()
        return loss.detach()

    def empty_pipe(self):
        """Send the last gradient and wait for the answers, so that evaluation and checkpoint see all updates."""
        torch.futures.wait_all(self.coming)
        torch.futures.wait_all(self.exchange(self.gradient_BD, None))
        self.coming = None
        self.gradient_BD = None

    def exchange(self, gradient_BD, batch):
        """Call pipelined_server.exchange on every server, with a gradient (or None) and the ids of a batch (or None).

        Return a list of Futures, one for each server's partial sums.
        """
        emb_rrefs = self.model.emb_rrefs
        if batch is None:
            parts = [(None, None)] * len(emb_rrefs)
        else:
            ids_I, offsets_B, _ = batch
            parts = split_by_shard(ids_I, offsets_B, len(emb_rrefs))
        # A bag's sum is the sum of the servers' partial sums, so the gradient of each partial sum is the gradient of
        # the bag's sum.  All servers get the same gradient.
        gradient = inline(gradient_BD)
        futures = []
        for emb_rref, (part_ids, part_offsets) in zip(emb_rrefs, parts, strict=True):
            exchange_args = (dist.get_rank(), gradient, inline(part_ids), inline(part_offsets))
            futures.append(rpc.rpc_async(emb_rref.owner(), pipelined_server.exchange, args=exchange_args))
        return futures
