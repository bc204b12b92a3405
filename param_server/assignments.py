"""Who works on which batches of an epoch. Plain data, without a lock: the Coordinator's lock protects it."""


class Assignments:
    """The batches that the trainers have to do before the next evaluation.

    The content of a batch does not depend on the trainer that does it. So the batches of a lost trainer can be dealt to
    the others.
    """

    def __init__(self, trainers):
        self.living = set(trainers)  # those that were not lost
        self.dealt = {}  # {trainer: numbers of the batches that it still has to do, in its order}
        self.done = {}  # {trainer: how many it has done since the last deal}
        self.of_the_lost = []  # numbers of the batches that lost trainers have not done

    def deal(self, batches):
        """Deal batches (their numbers) to the living trainers in turn. They replace those that were dealt before."""
        living = sorted(self.living)
        self.dealt = {trainer: list(batches[place :: len(living)]) for place, trainer in enumerate(living)}
        self.done = dict.fromkeys(living, 0)
        self.of_the_lost = []

    def left(self):
        """Return the numbers of all batches that were dealt and are not done."""
        return sorted([*self.of_the_lost, *(batch for batches in self.dealt.values() for batch in batches)])

    def at_work(self):
        """Return the trainers that have batches to do."""
        return {trainer for trainer, batches in self.dealt.items() if batches}

    def strike(self, trainer):
        """Strike out a trainer's next batch, because its gradient is applied."""
        self.dealt[trainer].pop(0)
        self.done[trainer] += 1

    def lose(self, trainer):
        """Take a lost trainer's batches from it, to be dealt again; return how many."""
        self.living.remove(trainer)
        batches = self.dealt.pop(trainer, [])
        self.of_the_lost += batches
        return len(batches)
