"""Who works on which batches of an epoch. Plain data, without a lock: the Coordinator's lock protects it."""

import collections


class Assignments:
    """The batches of an epoch that are not applied to the weights yet, by the trainer that has to do them.

    The content of a batch does not depend on the trainer that does it. So the batches of a lost trainer can be dealt to
    the others, and those that are left in a checkpoint to any number of trainers.
    """

    def __init__(self, trainers):
        self.living = set(trainers)  # those that were not lost
        self.undealt = []  # numbers of the batches that belong to no trainer yet, in order
        self.dealt = {}  # {trainer: numbers of the batches that it still has to do, in its order}
        self.done = collections.Counter()  # {trainer: how many it has done since the last deal}

    def left(self):
        """Return the numbers of all batches that are not applied yet."""
        return sorted([*self.undealt, *(batch for batches in self.dealt.values() for batch in batches)])

    def at_work(self):
        """Return the trainers that have batches to do."""
        return {trainer for trainer, batches in self.dealt.items() if batches}

    def begin(self, batches):
        """Begin an epoch, or the rest of one, that has these batches."""
        self.undealt = sorted(batches)
        self.dealt = {}

    def deal(self, count):
        """Deal the next `count` batches to the living trainers in turn.

        Called when all of them wait. What a trainer has not done of its last batches is dealt again.
        """
        left = self.left()
        now, self.undealt = left[:count], left[count:]
        living = sorted(self.living)
        self.done.clear()
        self.dealt = {trainer: now[place :: len(living)] for place, trainer in enumerate(living)}

    def strike(self, trainer):
        """Strike out a trainer's next batch, because its gradient is applied."""
        self.dealt[trainer].pop(0)
        self.done[trainer] += 1

    def lose(self, trainer):
        """Take a lost trainer's batches from it, to be dealt again; return how many."""
        self.living.remove(trainer)
        batches = self.dealt.pop(trainer, [])
        self.undealt = sorted(self.undealt + batches)
        return len(batches)
