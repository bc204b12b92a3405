"""Mode `pipelined`: one message for each batch, whose answer arrives while the trainer trains on another batch.

Message k asks for the sums of batch k + 1 and brings the gradient of batch k - 1. It is sent before the trainer trains
on batch k.

The price is staleness. When a gradient reaches the table, the rows that it was computed from have changed meanwhile, by
at most 1 + 5 (T - 1) updates with T trainers. docs/results/ddp_rpc.md derives this number.

A step's messages belong to different batches, so no autograd context can span them, and no DistributedOptimizer is
used. In the trainer the sums are a leaf of the graph. The server keeps its half of the graph until their gradient
arrives. Then it runs an ordinary backward pass, and updates its rows itself.

Read hogwild.py first. The model is the one that is there, and an evaluation is the same.

Shapes: B bags in a batch, I ids in a batch, D embedding dimensions, C classes.
"""

import itertools
import threading
from collections import defaultdict, deque

import torch
import torch.nn.functional as F
from torch import optim

import hogwild
from shards import split_by_shard


# hogwild's constructor collects parameter_rrefs. Here nothing needs them, but collecting them waits for the shards.
class Trainer(hogwild.Trainer):  # in a trainer
    def set_learning_rate(self, lr):
        self.opt = optim.SGD(self.model.parameters(), lr=lr)
        for emb_rref in self.emb_rrefs:
            emb_rref.rpc_sync().set_learning_rate(lr)

    def train(self, batches):
        """Train on these batches, and yield the loss of each.

        Only an evaluation calls HybridModel.forward. Here its two halves, lookup and `fc`, are in different steps.
        """
        next_sums = self.exchange_with_all(None, batches[0])  # Futures of the sums of the batch to come
        gradient_BD = None  # of the sums of the batch before
        for (_, _, target_B), next_batch in itertools.pairwise([*batches, None]):
            with torch.profiler.record_function("step"):
                sums_BD = sum(part.wait() for part in next_sums).to(self.device).requires_grad_()
                next_sums = self.exchange_with_all(gradient_BD, next_batch)

                loss = F.cross_entropy(self.model.fc(sums_BD), target_B.to(self.device))
                self.opt.zero_grad()
                loss.backward()  # DDP averages the gradients of fc, but not the gradient of the sums
                self.opt.step()
                gradient_BD = sums_BD.grad.cpu()
            yield loss.detach()
        # Evaluation and checkpoint must see all updates, so this waits for those of the last two gradients.
        torch.futures.wait_all(next_sums)
        torch.futures.wait_all(self.exchange_with_all(gradient_BD, None))

    def exchange_with_all(self, gradient_BD, batch):
        """Send a gradient (or None) and the ids of a batch (or None) to every server; return Futures of the sums."""
        parts = [(None, None)] * len(self.emb_rrefs)
        if batch is not None:
            ids_I, offsets_B, _ = batch
            parts = split_by_shard(ids_I, offsets_B, len(self.emb_rrefs))
        # The sum of a bag is the sum of the servers' parts, so all servers get the same gradient.
        return [
            emb_rref.rpc_async().exchange(self.rank, gradient_BD, part_ids, part_offsets)
            for emb_rref, (part_ids, part_offsets) in zip(self.emb_rrefs, parts, strict=True)
        ]


class EmbeddingShard(hogwild.EmbeddingShard):  # on a server, on RPC threads
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lock = threading.Lock()  # protects the update, and self.lookups, but not the queues in it
        self.lookups = defaultdict(deque)  # trainer -> its sums (B, D) that wait for their gradients, the oldest first

    def set_learning_rate(self, lr):
        # No lock: every trainer calls this before an epoch, with the same rate, and no update is made before all have
        # called. The first gradient comes after a backward pass in which DDP waits for all trainers.
        self.optimizer = optim.SGD(self.parameters(), lr=lr)

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
        waiting.append(sums_BD)  # no lock: this trainer waits for each answer before it calls again
        return sums_BD.detach().cpu()
