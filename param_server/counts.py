"""What has been applied to the weights, and so where in the work the job is."""

import collections
from typing import NamedTuple

STATE = ("epoch", "batch", "updates", "images", "stale", "accuracy")  # what a checkpoint has of Counts


class Origin(NamedTuple):
    """Where a gradient comes from."""

    batch: int  # its number
    trainer: int
    version: int  # the number of updates that the weights had from which it was computed
    images: int


class Counts:  # in a server
    def __init__(self, bar=None):
        """`bar`: a progress bar of images, which this moves."""
        self.epoch = 0  # number of epochs that are done
        self.batch = 0  # number of batches of this epoch that are done; it changes when all trainers are idle
        self.updates = 0
        self.images = collections.Counter()  # {epoch: number of images applied}
        self.stale = collections.Counter()  # {staleness: number of gradients that had it}
        self.accuracy = None
        self.new_images = 0  # applied since the start of this process
        self.update_list = None  # a list, if the updates of this process are to be listed; it grows with each of them
        self.bar = bar

    def add_update(self, *origins):
        """Count an update by the gradients of these origins."""
        batches, trainers, versions, images = zip(*origins, strict=True)
        if self.update_list is not None:
            update = {"epoch": self.epoch, "batches": batches, "trainers": trainers, "versions": versions}
            self.update_list.append(update)
        self.stale.update(self.updates - version for version in versions)
        self.images[self.epoch] += sum(images)
        self.new_images += sum(images)
        self.updates += 1
        if self.bar is not None:
            self.bar.update(sum(images))

    def staleness(self):
        """Return the figures of a summary: the mean over all gradients, and the maximum.

        Staleness is the number of updates between reading the weights for a gradient and applying the gradient.
        """
        total = sum(staleness * count for staleness, count in self.stale.items())
        mean = total / max(1, self.stale.total())
        return {"staleness_mean": round(mean, 3), "staleness_max": max(self.stale, default=0)}

    def state_dict(self):
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state):
        for name in STATE:
            setattr(self, name, state[name])
