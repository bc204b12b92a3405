"""Count how stale the gradients of a table are.

Runs in the server processes.  The staleness of a gradient is the number of updates of the table between the lookup and
the backward pass that brings its gradient.
"""

import threading
from collections import Counter

from torch.optim.optimizer import register_optimizer_step_post_hook


class StalenessCounter:
    """Counts for each lookup the updates of the table before the gradient of the lookup arrives."""

    def __init__(self, weight):
        self.weight = weight
        self.lock = threading.Lock()  # updates and gradients of different trainers arrive on different threads
        self.updates = 0
        self.counts = Counter()  # staleness -> number of gradients with it
        # Called after a step of any optimizer of this process.  In mode `sync` the same table has one optimizer for
        # each trainer, made by the trainer's DistributedOptimizer, so they cannot be asked one by one.
        register_optimizer_step_post_hook(self._count_update)

    def _count_update(self, optimizer, _args, _kwargs):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(parameter is self.weight for parameter in parameters):
            with self.lock:
                self.updates += 1

    def watch(self, sums_BD):
        """Count the updates between this lookup, which returned sums_BD [B, D], and the arrival of its gradient."""
        if not sums_BD.requires_grad:  # in an evaluation no gradient will arrive
            return
        updates_at_lookup = self.updates

        def count(_gradient_BD):
            with self.lock:
                self.counts[self.updates - updates_at_lookup] += 1

        sums_BD.register_hook(count)  # torch calls `count` in the backward pass, with the gradient of sums_BD
