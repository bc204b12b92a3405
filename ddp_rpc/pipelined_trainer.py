"""Mode `pipelined`: one round trip for each batch, and it is under way while the batch before it trains.

Runs in the trainer processes, on the RPC thread of _run_trainer.  The servers' part is pipelined_server.py.
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
    """The request for the sums of batch k + 1 takes the gradient of batch k - 1 along, and goes out before k trains.

    So a lookup misses exactly one step of this trainer's own: a staleness of one.  Autograd stays local on both sides
    (the sums are a leaf here, their gradient is what the server's half starts from), and fc is stepped in place,
    without dist_autograd's messages and DistributedOptimizer's.
    """

    shard_class = PipelinedShard  # what the servers make for this mode

    def __init__(self, model, lr):
        self.model = model
        self.criterion = nn.CrossEntropyLoss()
        self.opt = optim.SGD(model.parameters(), lr=lr)
        self.coming = None  # Futures of the sums of the next batch, one for each server; None: an epoch begins
        self.gradient_BD = None  # of the sums of the batch before; None: an epoch begins

    def set_learning_rate(self, lr):
        """Set the learning rate, here and (one trainer for all) on the servers.  A barrier must follow."""
        sgd.set_learning_rate(self.opt, lr)
        if dist.get_rank() == 0:
            for emb_rref in self.model.emb_rrefs:
                emb_rref.rpc_sync().set_learning_rate(lr)

    def step(self, batch, next_batch):
        """Train on one batch (ids [I], offsets [B], target [B]); return its loss, a tensor on this trainer's device.

        `next_batch` is None where the epoch ends.
        """
        if self.coming is None:
            self.coming = self.exchange(None, batch)
        sums_BD = self.model.add_up([unpacked(part.wait()) for part in self.coming]).requires_grad_()
        self.coming = self.exchange(self.gradient_BD, next_batch)

        logits_BC = self.model.fc(sums_BD)
        loss = self.criterion(logits_BC, batch[2].to(self.model.device))
        loss.backward()  # DDP averages the gradients of fc here; the sums' gradient stays our own
        self.opt.step()
        self.opt.zero_grad()
        self.gradient_BD = sums_BD.grad
        if next_batch is None:
            self.empty_pipe()
        return loss.detach()

    def empty_pipe(self):
        """Bring the last gradients to the servers: evaluation and checkpoint see the steps with all of them."""
        torch.futures.wait_all(self.coming)
        torch.futures.wait_all(self.exchange(self.gradient_BD, None))
        self.coming = None
        self.gradient_BD = None

    def exchange(self, gradient_BD, batch):
        """Send a gradient (or None) and a batch's ids (or None) to every server; return the Futures of the sums."""
        emb_rrefs = self.model.emb_rrefs
        if batch is None:
            parts = [(None, None)] * len(emb_rrefs)
        else:
            ids_I, offsets_B, _ = batch
            parts = split_by_shard(ids_I, offsets_B, len(emb_rrefs))
        # A bag's sum is the sum of the parts, so each part's gradient is the gradient of the sum: all get the same.
        gradient = inline(gradient_BD)
        futures = []
        for emb_rref, (part_ids, part_offsets) in zip(emb_rrefs, parts, strict=True):
            exchange_args = (dist.get_rank(), gradient, inline(part_ids), inline(part_offsets))
            futures.append(rpc.rpc_async(emb_rref.owner(), pipelined_server.exchange, args=exchange_args))
        return futures
