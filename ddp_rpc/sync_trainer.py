"""The three ways to train a HybridModel, side by side: sync (the tutorial's), averaged, pipelined.

Runs in the trainer processes, on the RPC thread that _run_trainer came in on.  Each class is one idea, and its
`train(batches, scale)` one epoch: it trains on each of the batches (ids [I], offsets [B], target [B]) and yields its
loss, a tensor on this trainer's device.  What the servers do for each mode stands in embedding_server.py.

`scale` multiplies the loss.  For plain SGD that is the same as multiplying the learning rate, and it is how to lower
the rate of optimizers that live in other processes without asking them.
"""

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer

import embedding_server
from embedding_server import inline, unpacked

# --------------------------------------------------------------------------------------------------------------- sync


class SyncTraining:
    """The tutorial's pattern: each trainer steps the shared table on its own, right after its own backward (Hogwild).

    With T trainers a row gets up to T steps of the full learning rate while `fc` gets one, with the average of T
    gradients: the sparse part learns with T times the rate of the dense part.
    """

    def __init__(self, model, lr):
        self.model, self.criterion = model, nn.CrossEntropyLoss()
        parameter_rrefs = [rpc.RRef(parameter) for parameter in model.parameters()]  # those of fc alone
        self.set_up_optimizers(parameter_rrefs, lr)

    def set_up_optimizers(self, parameter_rrefs, lr):
        """Make what steps the parameters: those in `parameter_rrefs`, which are fc's, and those of the table."""
        for rref in self.model.emb_rrefs:
            parameter_rrefs += rpc.rpc_sync(rref.owner(), embedding_server._retrieve_embedding_parameters, args=(rref,))
        # It makes an optim.SGD on every process that owns a parameter, and steps each by RPC: this process's own, too.
        self.opt = DistributedOptimizer(optim.SGD, parameter_rrefs, lr=lr)

    def step_optimizers(self, context_id):
        """Step with the gradients that backward has left in the context, here and on the servers."""
        self.opt.step(context_id)

    def train(self, batches, scale):
        """Train on each batch, and yield its loss."""
        for ids_I, offsets_B, target_B in batches:
            # A context of its own for each batch keeps the gradients of concurrent backwards apart, also on the
            # servers. They live in it, not in .grad, so there is no zero_grad() here.
            with dist_autograd.context() as context_id:
                logits_BC = self.model(ids_I, offsets_B)
                loss = self.criterion(logits_BC, target_B.to(self.model.device))
                # Through fc (here DDP averages) and through the lookups, on the servers.
                dist_autograd.backward(context_id, [loss * scale])
                self.step_optimizers(context_id)
            yield loss.detach()


# ----------------------------------------------------------------------------------------------------------- averaged


class AveragedTraining(SyncTraining):
    """`sync`, but the servers step once for all trainers, with the mean of their gradients, like DDP does with `fc`.

    T trainers then compute what one process computes on the T batches joined: the same rate for both parts.
    """

    def set_up_optimizers(self, parameter_rrefs, lr):
        self.opt = DistributedOptimizer(optim.SGD, parameter_rrefs, lr=lr)  # fc alone; each server has its own

    def step_optimizers(self, context_id):
        # Each server answers when it has stepped, which is when the last trainer has called.
        steps = [
            rpc.rpc_async(rref.owner(), embedding_server.average_and_step, args=(rref, dist.get_rank(), context_id))
            for rref in self.model.emb_rrefs
        ]
        self.opt.step(context_id)
        torch.futures.wait_all(steps)


# ---------------------------------------------------------------------------------------------------------- pipelined


class PipelinedTraining:
    """One round trip for each batch, and it is under way while the batch before it trains.

    The request for the sums of batch k + 1 takes the gradient of batch k - 1 along and goes out before batch k trains.
    So a lookup misses exactly one step of this trainer's own: a staleness of one.  Autograd stays local on both sides
    (the sums are a leaf here, their gradient is what the server's half starts from), and fc is stepped in place,
    without dist_autograd's messages and DistributedOptimizer's.
    """

    def __init__(self, model, lr):
        self.model, self.criterion = model, nn.CrossEntropyLoss()
        self.opt = optim.SGD(model.parameters(), lr=lr)

    def exchange(self, gradient_BD, batch):
        """Send a gradient (or None) and a batch's ids (or None) to every server; return the Futures of the sums."""
        num_shards = len(self.model.emb_rrefs)
        parts = [(None, None)] * num_shards
        if batch is not None:
            parts = embedding_server.split_by_shard(batch[0], batch[1], num_shards)
        # A bag's sum is the sum of the parts, so each part's gradient is the gradient of the sum: all get the same.
        trainer, gradient = dist.get_rank(), inline(gradient_BD)
        return [
            rpc.rpc_async(rref.owner(), embedding_server.exchange, args=(trainer, gradient, *map(inline, part)))
            for rref, part in zip(self.model.emb_rrefs, parts, strict=True)
        ]

    def train(self, batches, scale):
        """Train on each batch, and yield its loss."""
        gradient_BD = None
        coming = self.exchange(None, batches[0])
        for batch, next_batch in zip(batches, [*batches[1:], None], strict=True):
            sums_BD = self.model.add_up(unpacked(part.wait()) for part in coming).requires_grad_()
            coming = self.exchange(gradient_BD, next_batch)

            logits_BC = self.model.fc(sums_BD)
            loss = self.criterion(logits_BC, batch[2].to(self.model.device))
            (loss * scale).backward()  # DDP averages the gradients of fc here; the sums' gradient stays our own
            self.opt.step()
            self.opt.zero_grad()
            gradient_BD = sums_BD.grad
            if next_batch is None:  # the epoch ends with empty pipes: evaluation and checkpoint see every gradient
                torch.futures.wait_all(coming)
                torch.futures.wait_all(self.exchange(gradient_BD, None))
            yield loss.detach()


# -------------------------------------------------------------------------------------------------------- all of them

MODES = {"sync": SyncTraining, "averaged": AveragedTraining, "pipelined": PipelinedTraining}
