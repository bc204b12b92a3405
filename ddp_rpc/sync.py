"""Mode `sync`: `hogwild`, but each server makes one update for all trainers, with the mean of their gradients.

So, up to rounding, T trainers compute the same as one process with their T batches joined into one, and the table and
`fc` have the same learning rate. Read hogwild.py first. Here is what differs, in the order of a step.
"""

import threading
from functools import reduce

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import optim

import hogwild


class Trainer(hogwild.Trainer):  # in a trainer
    def set_learning_rate(self, lr):
        super().set_learning_rate(lr)
        for emb_rref in self.emb_rrefs:
            emb_rref.rpc_sync().set_learning_rate(lr)

    def step(self, batch):
        ids_I, offsets_B, target_B = batch
        with dist_autograd.context() as context_id:
            logits_BC = self.model(ids_I, offsets_B)
            loss = F.cross_entropy(logits_BC, target_B.to(self.device))
            dist_autograd.backward(context_id, [loss])
            # Sent before the step of fc, so that both steps run at the same time.
            table_steps = [
                emb_rref.rpc_async().average_and_step(self.rank, dist.get_world_size(), context_id)
                for emb_rref in self.emb_rrefs
            ]
            self.opt.step(context_id)  # of fc alone
            torch.futures.wait_all(table_steps)  # a server answers when it has made the update of all trainers
        return loss.detach()


class EmbeddingShard(hogwild.EmbeddingShard):  # on a server, on RPC threads
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lock = threading.Lock()  # protects gradients, stepped and the update
        self.gradients = {}  # trainer -> gradient, for the trainers that have called since the last update
        self.stepped = torch.futures.Future()  # the answer to these trainers; the next update completes it

    def parameter_rrefs(self):
        return []  # a trainer's DistributedOptimizer leaves the table alone, because average_and_step updates it

    def set_learning_rate(self, lr):
        # Every trainer calls this before an epoch, with the same rate, so it does not matter whose SGD remains. No
        # update is made before all have called, because it needs a gradient of each.
        self.optimizer = optim.SGD(self.parameters(), lr=lr)

    # With async_execution the answer is sent when the returned Future is complete. No RPC thread waits for it.
    @rpc.functions.async_execution
    def average_and_step(self, trainer, num_trainers, context_id):
        """Take one trainer's gradient, which its backward pass has left here, in its context.

        The call of the last trainer makes the update. No lookup runs meanwhile, because all trainers wait.
        """
        gradient = dist_autograd.get_gradients(context_id)[self.weight]
        with self.lock:
            self.gradients[trainer] = gradient
            stepped = self.stepped
            complete = len(self.gradients) == num_trainers
            if complete:
                self.weight.grad = mean_of(self.gradients)
                self.optimizer.step()
                self.gradients = {}
                self.stepped = torch.futures.Future()
        if complete:
            stepped.set_result(None)  # outside the lock, because this sends the answers to all trainers
        return stepped


def mean_of(gradients):
    """Return the mean of {trainer: gradient}, the same to the last bit in whatever order the trainers called."""
    # A floating-point sum depends on the order of its terms, so this adds in the order of the trainers.
    # (sum() would begin with 0, to which a sparse tensor cannot be added.)
    total = reduce(torch.add, [gradients[trainer] for trainer in sorted(gradients)])
    if total.is_sparse:
        # A row may have several entries. coalesce() adds them up in a fixed order; the optimizer on a GPU does not.
        total = total.coalesce()
    return total / len(gradients)
