"""The Coordinator, in rank 0: it deals batches, and when all trainers wait, it saves a checkpoint and evaluates.

It is the same in all modes. lead() is the loop of the whole job, on rank 0's main thread. Everything else is called by
others, on other threads, and only changes data under a lock.
"""

import collections
import math
import threading
import time

import torch
import torch.distributed.rpc as rpc

from assignments import Assignments
from evaluation import get_accuracy
from glue import UserError
from glue.report import check_finite

# The attributes of a Coordinator that are in a checkpoint:
STATE = ("epoch", "updates", "unmeasured", "images_applied", "stale", "accuracy")

coordinator = None  # of this process, if it is rank 0


def make_coordinator(*values):
    global coordinator
    coordinator = Coordinator(*values)
    return coordinator


def get_coordinator():
    return coordinator


def get_parameter_server():
    return coordinator.server


class Coordinator:  # in rank 0
    """Leads one job. `server`, which main.py sets, is the mode's ParameterServer; `progress` prints and saves."""

    def __init__(self, plan, evaluations, checkpoint_every, test_digits):
        """`checkpoint_every`: updates between two checkpoints, or None; `test_digits`: images and labels."""
        self.plan = plan
        self.evaluations = evaluations
        self.checkpoint_every = checkpoint_every
        self.test_digits = test_digits
        self.server = None
        self.progress = None
        # The one lock of rank 0. It guards what follows, and the server's weights. Notified when lead() may go on.
        # Never wait for an RPC while holding it: answers arrive on the threads that also serve calls. If calls that
        # wait for this lock blocked all of them, the answer could not arrive, and nobody would release the lock.
        self.changed = threading.Condition()
        self.assignments = Assignments(range(1, plan.world_size))
        self.waiting = {}  # {trainer: Future of its next assignment}
        self.batches_per_epoch = None  # in the whole training set; the trainers know it
        self.epoch = 0  # number of epochs that are done
        self.updates = 0
        self.unmeasured = 0  # batches that were applied since the last evaluation
        self.saved_at = 0  # `updates` at the last checkpoint
        self.images_applied = []  # number of images applied to the weights, for each epoch
        self.stale = collections.Counter()  # {staleness: number of gradients that had it}
        self.accuracy = None

    def lead(self):
        """Deal and wait, evaluate and save, epoch by epoch. Between two deals all trainers wait, so nothing changes."""
        left = self.progress.start()  # numbers of the batches left of an epoch that was begun, or None
        self.wait_for_trainers()
        while self.epoch < self.plan.epochs:
            self.begin_epoch(left)
            while self.left():
                if self.unmeasured >= self.batches_in_part():
                    self.evaluate()
                    self.progress.within_epoch()
                started = time.perf_counter()
                self.deal()
                self.wait_for_trainers()
                self.progress.seconds += time.perf_counter() - started
                self.check_weights()
                if self.checkpoint_every and self.updates - self.saved_at >= self.checkpoint_every:
                    self.save(self.left())  # before the evaluation, which a restart then repeats
            self.evaluate()
            self.epoch += 1
            self.progress.after_epoch()
            self.save(None)
            left = None
        self.answer({})  # None for all: the work is done

    def wait_for_trainers(self):
        """Return when all living trainers wait for batches."""
        with self.changed:
            self.changed.wait_for(lambda: self.assignments.living <= self.waiting.keys())

    def begin_epoch(self, left):
        """Begin an epoch, or, after a restart, go on with the batches that are `left` of it."""
        plan = self.plan
        self.server.set_learning_rate(plan.lr * 0.1 ** (self.epoch // plan.lr_step) if plan.lr_step else plan.lr)
        with self.changed:
            if left is None:
                left = range(self.batches_in_epoch())
                self.images_applied.append(0)
            self.assignments.begin(left)

    def batches_in_epoch(self):
        """Return how many batches the trainers do together in an epoch. --max_batches is for each trainer."""
        most = self.plan.max_batches * (self.plan.world_size - 1)
        return min(self.batches_per_epoch, most or self.batches_per_epoch)

    def batches_in_part(self):
        """Return after how many batches the accuracy is measured."""
        return math.ceil(self.batches_in_epoch() / self.evaluations)

    def left(self):
        with self.changed:  # a trainer may be lost at any moment
            return self.assignments.left()

    def deal(self):
        """Deal batches up to the next evaluation or checkpoint, and answer the waiting trainers."""
        with self.changed:
            trainers = len(self.assignments.living)
            # Whole rounds, in which each trainer does a batch: so in `sync` an evaluation falls between two updates.
            rounds = math.ceil((self.batches_in_part() - self.unmeasured) / trainers)
            batches = rounds * trainers
            if self.checkpoint_every:
                updates = max(1, self.checkpoint_every - (self.updates - self.saved_at))
                batches = min(batches, updates * self.server.gradients_in_update())
            self.assignments.deal(batches)
            dealt = {trainer: (self.epoch, batches.copy()) for trainer, batches in self.assignments.dealt.items()}
        self.answer(dealt)

    def answer(self, assignments):
        """Answer all waiting trainers. `assignments`: {trainer: its next one}."""
        with self.changed:
            waiting, self.waiting = self.waiting, {}
        for trainer, future in waiting.items():  # outside the lock, because this sends messages
            future.set_result(assignments.get(trainer))

    def evaluate(self):
        self.accuracy = get_accuracy(self.server.model, *self.test_digits)
        self.unmeasured = 0
        self.progress.after_evaluation()

    def check_weights(self):
        for name, weights in self.server.model.named_parameters():
            check_finite(weights.sum(), f"sum of the weights {name}", self.updates)

    def save(self, left):
        self.progress.save(self.state_dict(left))
        self.saved_at = self.updates

    def state_dict(self, left):
        """`left`: as in begin_epoch."""
        progress = {name: getattr(self, name) for name in STATE} | {"left": left}
        return {"progress": progress} | self.server.state_dict()

    def load_state_dict(self, state):
        """Load a checkpoint; return the batches left of the epoch that was begun, or None."""
        for name in STATE:
            setattr(self, name, state["progress"][name])
        self.saved_at = self.updates
        self.server.load_state_dict(state)
        return state["progress"]["left"]

    # Trainers call the next two methods, on RPC threads.

    @rpc.functions.async_execution
    def next_assignment(self, trainer, batches_per_epoch):
        """Answer with (epoch, numbers of the batches to do) when lead() deals them, or with None: the work is done.

        Because of async_execution, trainers that wait block no RPC thread. An epoch's number is from 0.
        """
        answer = torch.futures.Future()
        with self.changed:
            self.refuse_if_lost(trainer)
            self.batches_per_epoch = batches_per_epoch
            self.waiting[trainer] = answer
            self.changed.notify()
        return answer

    def record_loss(self, trainer, batch, loss):
        with self.changed:
            self.progress.loss(trainer, batch, loss)

    # The server calls the next two, under the lock.

    def refuse_if_lost(self, trainer):
        """Raise an error if the job goes on without this trainer. It may only have been stopped for a while."""
        if trainer not in self.assignments.living:
            raise UserError(f"rank {trainer} was lost; its batches go to other trainers")

    def count_update(self, gradients):
        """Count an update. `gradients`: (trainer, images, version) of each gradient in it, which is of one batch.

        Its version is the number of updates when the weights were read from which it was computed.
        """
        for trainer, images, version in gradients:
            self.assignments.strike(trainer)
            self.images_applied[-1] += images
            self.stale[self.updates - version] += 1
            self.unmeasured += 1
            self.progress.after_step(images)
        self.updates += 1

    # The job calls this, on a thread of its own.

    def on_lost(self, trainer):
        """Go on without a trainer (--on_lost continue); return a few words about its batches."""
        with self.changed:  # so, between two updates; after this, none of its gradients is applied
            left = self.assignments.lose(trainer)
            self.waiting.pop(trainer, None)
            self.changed.notify()
        self.server.on_lost(trainer)
        return f"batches of this epoch that go to the others: {left}" if left else ""
