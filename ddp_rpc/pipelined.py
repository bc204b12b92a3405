"""Mode `pipelined`: one message for each batch, whose answer arrives while the trainer trains on another batch.

Message k asks for the sums of batch k + 1 and brings the gradient of batch k - 1. It is sent before the trainer trains
on batch k.

The price is staleness. When a gradient reaches the table, the rows that it was computed from have changed meanwhile, by
at most 1 + 5 (T - 1) updates with T trainers. docs/results/ddp_rpc.md derives this number.

A step's messages belong to different batches, so no autograd context can span them, and no DistributedOptimizer is
used. In the trainer the sums are a leaf of the graph. The server keeps its half of the graph until their gradient
arrives. Then it runs an ordinary backward pass, and updates its rows itself.

Read hogwild.py first. The model is the one that is there, and so is the lookup of an evaluation.

Shapes: B bags in a batch, I ids in a batch, D embedding dimensions, C classes.
"""

import threading
from collections import defaultdict, deque

import torch
import torch.distributed as dist
from torch import nn, optim

import hogwild
from shards import Shard, split_by_shard


class Trainer:  # in a trainer
    def __init__(self, emb_rrefs, embedding_dim, device):
        self.model = hogwild.HybridModel(emb_rrefs, embedding_dim, device)
        self.criterion = nn.CrossEntropyLoss()
        self.next_sums = None  # Futures of the sums of the batch to come, one for each server; None before an epoch
        self.gradient_BD = None  # the gradient of the previous batch's sums; None before an epoch
        for emb_rref in emb_rrefs:
            emb_rref.rpc_sync(timeout=0).wait_until_made()

    def set_learning_rate(self, lr):
        self.opt = optim.SGD(self.model.parameters(), lr=lr)
        for emb_rref in self.model.emb_rrefs:
            emb_rref.rpc_sync().set_learning_rate(lr)

    def step(self, batch, next_batch):
        """Train on one batch; return its loss. In the last step of an epoch next_batch is None.

        Only an evaluation calls HybridModel.forward. Here its two halves, lookup and `fc`, are in different steps.
        """
        if self.next_sums is None:
            self.next_sums = self.exchange(None, batch)
        sums_BD = sum(part.wait() for part in self.next_sums).to(self.model.device).requires_grad_()
        self.next_sums = self.exchange(self.gradient_BD, next_batch)

        logits_BC = self.model.fc(sums_BD)
        loss = self.criterion(logits_BC, batch[2].to(self.model.device))
        self.opt.zero_grad()
        loss.backward()  # DDP averages the gradients of fc, but not the gradient of the sums
        self.opt.step()
        self.gradient_BD = sums_BD.grad.cpu()
        if next_batch is None:
            self.empty_pipe()
        return loss.detach()

    def empty_pipe(self):
        """Send the last gradient and wait for the answers, so that evaluation and checkpoint see all updates."""
        torch.futures.wait_all(self.next_sums)
        torch.futures.wait_all(self.exchange(self.gradient_BD, None))
        self.next_sums = None
        self.gradient_BD = None

    def exchange(self, gradient_BD, batch):
        """Send a gradient (or None) and the ids of a batch (or None) to every server; return Futures of the sums."""
        emb_rrefs = self.model.emb_rrefs
        parts = [(None, None)] * len(emb_rrefs)
        if batch is not None:
            ids_I, offsets_B, _ = batch
            parts = split_by_shard(ids_I, offsets_B, len(emb_rrefs))
        # The sum of a bag is the sum of the servers' parts, so all servers get the same gradient.
        return [
            emb_rref.rpc_async().exchange(dist.get_rank(), gradient_BD, part_ids, part_offsets)
            for emb_rref, (part_ids, part_offsets) in zip(emb_rrefs, parts, strict=True)
        ]


class EmbeddingShard(Shard):  # on a server, on RPC threads
    look_up = hogwild.EmbeddingShard.look_up  # for an evaluation

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lock = threading.Lock()  # protects the update, and self.lookups
        self.lookups = defaultdict(deque)  # trainer -> its sums (B, D) that wait for their gradients, the oldest first

    def wait_until_made(self):
        """Return. No method is called before the constructor has returned, which takes long for a large table."""

    def set_learning_rate(self, lr):
        self.optimizer = optim.SGD(self.parameters(), lr=lr)  # every trainer calls this; the last one made remains

    def exchange(self, trainer, gradient_BD, ids_I, offsets_B):
        """Make an update with the gradient of this trainer's oldest lookup; return the sums (B, D) of its next batch.

        The gradient is None in the first two calls of an epoch, the ids are None in the last two.
        """
        with self.lock:  # several trainers may begin at the same time
            waiting = self.lookups[trainer]
        device = self.weight.device
        if gradient_BD is not None:
            with self.lock:  # weight.grad is one for all trainers
                waiting.popleft().backward(gradient_BD.to(device))
                self.optimizer.step()
                self.optimizer.zero_grad()
        if ids_I is None:
            return None
        sums_BD = self(ids_I.to(device), offsets_B.to(device))  # no lock, as in hogwild
        waiting.append(sums_BD)
        return sums_BD.detach().cpu()
