"""Mode `averaged`, the servers' part: one step for all trainers, with the mean of their gradients.

Runs in the server processes, on RPC threads.  The trainers' part is averaged_trainer.py.
"""

import threading
from functools import reduce

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import optim

import sgd
from embedding_server import EmbeddingShard


class AveragingShard(EmbeddingShard):
    """An EmbeddingShard that steps its rows by itself, when the gradients of all trainers have come."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.optimizer = optim.SGD(self.parameters(), lr=0.0)  # the rate is set before each epoch
        self.lock = threading.Lock()  # guards the optimizer, weight.grad, and:
        self.gradients = {}  # trainer -> its gradient, of those that have come so far
        self.stepped = torch.futures.Future()  # what these trainers wait for

    def set_learning_rate(self, lr):
        """Set the learning rate.  Needs no lock: one trainer calls it, while no trainer trains."""
        sgd.set_learning_rate(self.optimizer, lr)

    @rpc.functions.async_execution  # the answer goes out when the Future is complete; no server thread waits for it
    def average_and_step(self, trainer, num_trainers, context_id):
        """Take one trainer's gradient; when all have come, step once with their mean.  Return a Future of that step.

        `trainer` is its number; `context_id` is the dist_autograd context in which it has run backward: its gradient
        is here already.  All trainers call this at once; locked.  Nobody looks rows up meanwhile: all of them wait for
        this step.
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
            stepped.set_result(None)  # outside the lock: this sends the answers to all the trainers that wait
        return stepped


def mean_of(gradients):
    """Return the mean of {trainer: gradient}, whose last bits do not depend on the order of the trainers' calls.

    Floating-point sums depend on their order, so it is that of the trainers' numbers.
    """
    total = reduce(torch.add, [gradients[trainer] for trainer in sorted(gradients)])
    if total.is_sparse:
        # An id may stand in it several times.  coalesce() adds these up in a fixed order; the optimizer on a GPU, in
        # whatever order they come.
        total = total.coalesce()
    return total / len(gradients)
