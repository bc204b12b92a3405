"""Mode `averaged`, the servers' part: one update for all trainers, with the mean of their gradients.

Runs in the server processes, on RPC threads.  The trainers' part is averaged_trainer.py.
"""

from functools import reduce

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from stepping_server import SteppingShard


class AveragingShard(SteppingShard):
    """A SteppingShard that makes an update when it has the gradients of all trainers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # self.lock also protects these two:
        self.gradients = {}  # trainer -> gradient, for the trainers that have called since the last update
        self.stepped = torch.futures.Future()  # it is completed by the next update; then these trainers get answers

    # The answer is sent when the returned Future is complete.  No RPC thread of the server waits for it.
    @rpc.functions.async_execution
    def average_and_step(self, trainer, num_trainers, context_id):
        """Collect one trainer's gradient.  The last trainer's call makes one update with the mean of all gradients.

        `trainer` is the number of the calling trainer.  `context_id` is the dist_autograd context in which it has run
        backward, so its gradient is already in this process.  Returns a Future, which is complete after the update.
        All trainers call this at the same time; a lock protects the gradients and the update.  No trainer looks up rows
        during the update, because all of them wait for it.
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
    """Return the mean of {trainer: gradient}.  It is the same, to the last bit, in whatever order the trainers called.

    A floating-point sum depends on the order of its terms, so this always adds in the order of the trainers' numbers.
    """
    total = reduce(torch.add, [gradients[trainer] for trainer in sorted(gradients)])
    if total.is_sparse:
        # A sparse gradient may have several entries for a row.  coalesce() adds them up in a fixed order.  Without it,
        # the optimizer would add them up, and on a GPU the order is not fixed.
        total = total.coalesce()
    return total / len(gradients)
