"""Count how stale the gradients of a table are.

Runs in the server processes.  The staleness of a gradient is the number of updates of the table between the lookup and
the backward pass that brings its gradient.
"""

import threading
from collections import Counter


class StalenessCounter:
    """Counts for each lookup the updates of the table before the gradient of the lookup arrives."""

    def __init__(self, weight):
        self.weight = weight
        self.lock = threading.Lock()  # gradients of different trainers arrive on different threads
        self.counts = Counter()  # staleness -> number of gradients with it

    def watch(self, sums_BD):
        """Count the updates between this lookup, which returned sums_BD [B, D], and the arrival of its gradient."""
        if not sums_BD.requires_grad:  # in an evaluation no gradient will arrive
            return
        steps_at_lookup = steps_taken(self.weight)

        def count(_gradient_BD):
            staleness = steps_taken(self.weight) - steps_at_lookup
            with self.lock:
                self.counts[staleness] += 1

        sums_BD.register_hook(count)  # torch calls `count` in the backward pass, with the gradient of sums_BD


def steps_taken(weight):
    """Return how often the values of a tensor were changed.  While a table is trained, each update changes them once.

    `_version` is a private name of torch.  The public Optimizer.register_step_post_hook sees the steps of one optimizer
    only, but in mode `sync` the same table has one optimizer for each trainer, made by the trainer's
    DistributedOptimizer.
    """
    return weight._version
