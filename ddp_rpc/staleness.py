"""How stale the gradients of a table are (runs in the server processes)."""

import threading
from collections import Counter


class StalenessCounter:
    """Counts, for each lookup in a table, the steps that the table takes before the gradient of the lookup arrives."""

    def __init__(self, weight):
        self.weight = weight
        self.lock = threading.Lock()  # gradients of different trainers arrive on threads of their own
        self.counts = Counter()  # staleness -> how many gradients had it

    def watch(self, sums_BD):
        """Count the steps from now on until backward brings the gradient of this lookup."""
        if not sums_BD.requires_grad:  # an evaluation: no gradient will arrive
            return
        steps_at_lookup = steps_taken(self.weight)

        def count(_gradient_BD):
            staleness = steps_taken(self.weight) - steps_at_lookup
            with self.lock:
                self.counts[staleness] += 1

        sums_BD.register_hook(count)  # torch calls it in backward, with the gradient


def steps_taken(weight):
    """Return how often the values of a tensor have been changed: for a table that is trained, by one step each time.

    `_version` is a private name of torch.  What is public (Optimizer.register_step_post_hook) tells of the steps of one
    optimizer, and in mode `sync` each trainer's DistributedOptimizer makes another one for the same table.
    """
    return weight._version
