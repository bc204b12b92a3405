"""What server1 does in every mode: it deals batches, and when all trainers have done theirs, it evaluates and saves.

Each mode's ParameterServer is a Coordinator that has weights. lead() is the loop of the whole job, on server1's main
thread. The methods at the end are called on other threads, and only change data under a lock.
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

# The attributes of a Coordinator that are in a checkpoint, besides the states of its model and its optimizer:
STATE = ("epoch", "batch", "updates", "images_applied", "stale", "accuracy")

param_server = None  # the ParameterServer of this process, if it is server1; main.py sets it


def get_parameter_server():
    return param_server


class Coordinator:  # in server1
    """Leads one job. A mode's ParameterServer adds `model`, its `optimizer`, and the calls that train them."""

    def __init__(self, plan):
        self.plan = plan
        self.progress = None  # prints and saves; main.py sets it
        # The one lock of server1. It guards the attributes below and the weights, but is not held during a forward or
        # backward pass. It is a Condition, because lead() also waits on it until others notify it. While all trainers
        # are idle, lead() evaluates, saves and counts epochs without it: no other thread changes these then.
        # Never wait for an RPC while holding it: answers arrive on the threads that also serve calls. If calls that
        # wait for this lock blocked all of them, the answer could not arrive, and nobody would release the lock.
        self.lock = threading.Condition()
        self.assignments = Assignments(range(plan.num_servers, plan.world_size))
        self.idle = {}  # {trainer: Future of its next assignment}
        self.batches_per_epoch = None  # in the training set; the trainers, who have the images, say how many
        self.epoch = 0  # number of epochs that are done
        self.batch = 0  # number of batches of this epoch that are done
        self.updates = 0
        self.images_applied = collections.Counter()  # {epoch: number of images applied to the weights}
        self.stale = collections.Counter()  # {staleness: number of gradients that had it}
        self.accuracy = None
        self.seconds = 0.0  # in which the trainers worked, since the start of this process

    def lead(self, evaluations, test_digits):
        """Train and evaluate until the work is done. `evaluations`: per epoch; `test_digits`: (images, labels)."""
        plan = self.plan
        self.progress.start()
        self.wait_for_trainers()
        most = plan.max_batches * (plan.world_size - plan.num_servers)
        batches = min(self.batches_per_epoch, most or self.batches_per_epoch)
        while self.epoch < plan.epochs:
            with self.lock:
                trainers = len(self.assignments.living)
            # Whole rounds, one batch for each trainer: so in `sync` no update before an evaluation lacks a gradient.
            rounds = math.ceil(batches / (evaluations * trainers))
            end = min(self.batch + rounds * trainers, batches)
            self.train(range(self.batch, end))
            self.evaluate(*test_digits)
            self.batch = end
            if end == batches:
                self.epoch += 1
                self.batch = 0
            self.progress.after_evaluation()  # saves: all trainers are idle, so the checkpoint is of one moment
        self.answer({})  # None for all: the work is done

    def train(self, batches):
        """Have these batches of the epoch done; return when all trainers are idle again."""
        plan = self.plan
        self.set_learning_rate(plan.lr * 0.1 ** (self.epoch // plan.lr_step) if plan.lr_step else plan.lr)
        started = time.perf_counter()
        while batches:
            with self.lock:
                self.assignments.deal(batches)
                dealt = {trainer: (self.epoch, numbers.copy()) for trainer, numbers in self.assignments.dealt.items()}
            self.answer(dealt)
            batches = self.wait_for_trainers()  # those of lost trainers
        self.seconds += time.perf_counter() - started

    def set_learning_rate(self, lr):
        self.optimizer.param_groups[0]["lr"] = lr

    def wait_for_trainers(self):
        """Wait until all living trainers are idle; return the numbers of the dealt batches that are not done."""
        with self.lock:
            # Without any trainer this waits until the job ends this process.
            self.lock.wait_for(lambda: self.idle and self.assignments.living <= self.idle.keys())
            return self.assignments.left()

    def answer(self, assignments):
        """Answer all idle trainers. `assignments`: {trainer: its next one}."""
        with self.lock:
            idle, self.idle = self.idle, {}
        for trainer, future in idle.items():  # outside the lock, because this sends messages
            future.set_result(assignments.get(trainer))

    def evaluate(self, images, labels):
        for name, weights in self.model.named_parameters():
            check_finite(weights.sum(), f"sum of the weights {name}", self.updates)
        self.accuracy = get_accuracy(self.model, images, labels)

    def state_dict(self):
        progress = {name: getattr(self, name) for name in STATE}
        return {"progress": progress, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        for name in STATE:
            setattr(self, name, state["progress"][name])
        self.model.load_state_dict(state["model"])  # in place
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["momentum"] = self.plan.momentum  # a resumed run may have another one

    # Trainers call the next two methods, on RPC threads.

    @rpc.functions.async_execution
    def next_assignment(self, trainer, batches_per_epoch):
        """Answer with (epoch, numbers of the batches to do) when lead() deals them, or with None: the work is done.

        Because of async_execution, idle trainers block no RPC thread. Epochs are numbered from 0.
        """
        answer = torch.futures.Future()
        with self.lock:
            self.refuse_if_lost(trainer)
            self.batches_per_epoch = batches_per_epoch
            self.idle[trainer] = answer
            self.lock.notify()
        return answer

    def record_loss(self, trainer, batch, loss):
        self.progress.loss(trainer, batch, loss)

    # The ParameterServer calls the next two, under the lock.

    def refuse_if_lost(self, trainer):
        """Raise an error if the job goes on without this trainer. (If it was only stopped, it may still call.)"""
        if trainer not in self.assignments.living:
            raise UserError(f"trainer{trainer} was lost; its batches go to the others")

    def count_update(self, gradients):
        """Count an update. `gradients`: (trainer, images, version) of each gradient in it.

        A gradient is of one batch. `version` is the number of updates that had been made when the trainer read the
        weights.
        """
        for trainer, images, version in gradients:
            self.assignments.strike(trainer)
            self.images_applied[self.epoch] += images
            self.stale[self.updates - version] += 1
            self.progress.after_step(images)
        self.updates += 1

    # The job calls this, on a thread of its own.

    def on_lost(self, trainer):
        """Go on without a trainer (--on_lost continue); return a few words about its batches."""
        with self.lock:  # between two updates: from now on, no gradient of this trainer is applied
            left = self.assignments.lose(trainer)
            self.idle.pop(trainer, None)
            self.lock.notify()
        return f"batches of this epoch that go to the others: {left}" if left else ""
