"""The progress of a job: assignments of batches to trainers, updates, staleness, accuracy, checkpoints.

A job has one Scoreboard, in the process of rank 0, where the first server is.  The trainers call next_assignment and
record_loss over RPC.  The server calls batch_of, at_work and count_update.  The Scoreboard is the same for both modes,
and does not depend on how the server stores the weights.
"""

import collections
import concurrent.futures
import itertools
import math
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed.rpc as rpc

from glue import UserError, checkpoint, report
from glue.host import all_cores
from mnist_data import load_digits, normalised
from rpc_names import trainers

# Flags that a run with --resume must have in common with the run that wrote the checkpoint.
SETTINGS = ("seed", "mode", "dataset", "batch_size", "max_batches", "sync_every")


@dataclass
class Assignment:
    """The batches that a trainer does next."""

    epoch: int  # from 0
    lr: float
    batches: list  # their numbers


@dataclass
class Work:
    """Describes a gradient: what it was computed from."""

    trainer: int
    version: int  # of the weights: the number of updates before they were read
    images: int
    batches: int


class Scoreboard:
    """The progress of one job.

    The batches of an epoch are assigned to the living trainers, which are those that were not lost. A batch is removed
    from its trainer's assignment when it has been applied to the weights. If a trainer is lost, the others get the rest
    of its assignment, after they have done their own. Batches that are left in a checkpoint are assigned to the
    trainers of the run that resumes it. The content of a batch does not depend on the trainer that does it.

    `server` must have capture(), restore(state), start_assignments(lr), forget(trainer), and `model`, which has the
    weights that were captured last.

    A separate thread, the writer, writes the checkpoints in the order in which they became due. So training does not
    wait for a slow disk, except at the end of an epoch.
    """

    def __init__(self, args, server):
        self.args = args
        self.server = server
        self.settings = {name: vars(args)[name] for name in SETTINGS}
        self.lock = threading.Lock()  # for what several trainers' calls may use at the same time
        # These are in a checkpoint:
        self.epoch = 0
        self.updates = 0
        self.stale = collections.Counter()  # staleness -> number of gradients that had it
        self.accuracy = None
        self.images_applied = []  # number of images applied to the weights, for each epoch
        # Trainer -> numbers of the batches that it still has to do.  None: the epoch's batches are not assigned yet.
        self.assignments = None
        self.later = []  # numbers of this epoch's batches after the next evaluation
        # These count from the start of this process:
        self.living = set(trainers(args))
        self.images = 0
        self.seconds = 0.0
        self.started = None  # time at which the trainers got their assignments
        self.batches_per_epoch = None
        self.waiting = {}  # trainer -> Future of its next Assignment
        self.writer = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self.last_save = None  # Future of the last checkpoint that was given to the writer
        self.test_images, self.test_labels = load_digits(args.dataset, args.data_dir, args.seed, train=False)
        self.report = report.Report("param_server", args)
        self.bar = self.report.progress(unit="image")

    # ---------------------------------------------------------------------- called by the trainers, over RPC

    @rpc.functions.async_execution
    def next_assignment(self, trainer, batches_per_epoch):
        """Answer with an Assignment when all living trainers have called this, or with None if the work is done.

        Because of async_execution, trainers that wait for the answer block no RPC thread. May be called by all trainers
        at once (locked). The last trainer's call also runs the evaluation, while all others wait.
        """
        answer = torch.futures.Future()
        with self.lock:
            if trainer in self.waiting:
                raise RuntimeError(f"trainer_{trainer} asked for batches before its last request was answered")
            self.batches_per_epoch = batches_per_epoch
            self.waiting[trainer] = answer
        self.go_on_if_everybody_is_here()
        return answer

    def record_loss(self, trainer, batch, loss):
        """Print the loss of one batch, in the tutorial's words.  May be called by all trainers at once (locked)."""
        with self.lock:
            self.report.say(f"Rank {trainer} training batch {batch} loss {loss}")
            self.report.scalar("loss", loss, self.updates)

    # ---------------------------------------------------------------------- called by the server, in this process

    def batch_of(self, trainer):
        """Return the (epoch, batch) that a trainer is working on.

        Raise RuntimeError if the trainer was lost (it may only have been stopped for a while), or has nothing to do.
        """
        if trainer not in self.living:
            raise UserError(f"trainer_{trainer} was lost; its batches go to other trainers")
        batches = self.batches_left_of(trainer)
        if not batches:
            raise RuntimeError(f"trainer_{trainer} sent a gradient after the last batch of its assignment")
        return self.epoch, batches[0]

    def at_work(self):
        """Return the living trainers whose assignments are not done.  Called under the server's lock."""
        return {trainer for trainer in self.living if self.batches_left_of(trainer)}

    def count_update(self, works):
        """Count one update of the weights, with the gradients of these Works.  Return whether a checkpoint is due.

        Called under the server's lock, so that no trainer can read the new weights before. If a checkpoint is due, the
        server calls save_soon().
        """
        for work in works:
            del self.assignments[work.trainer][: work.batches]
            self.stale[self.updates - work.version] += 1
            self.images_applied[-1] += work.images
            self.images += work.images
            self.bar.update(work.images)
        self.updates += 1
        return self.is_checkpoint_due()

    def is_checkpoint_due(self):
        """Return True every --checkpoint_every updates, unless one is being written.  Raise the last one's error."""
        if self.last_save:
            if not self.last_save.done():
                return False
            self.last_save.result()
        return bool(self.args.checkpoint) and self.updates % self.args.checkpoint_every == 0

    def save_soon(self, get_weights):
        """Let the writer save the current progress, and the current weights, which get_weights() returns later.

        Called when neither can change: under the server's lock, or while all trainers wait.
        """
        self.last_save = self.writer.submit(self.save, self.progress(), get_weights)

    # ---------------------------------------------------------------------- called by the job

    def drop(self, trainer):
        """Continue without a trainer that was lost.  Return words on what happens to its batches, for the message."""
        self.server.forget(trainer)  # after this, none of its gradients is applied
        left = len(self.batches_left_of(trainer))
        self.go_on_if_everybody_is_here()
        return f"batches of this epoch that go to the others: {left}" if left else ""

    def resume(self):
        """Continue from --checkpoint, if --resume was given.  Called before init_rpc."""
        state = checkpoint.resume(self.args, "param_server", self.settings)
        if state is None:
            return
        try:
            progress = state["progress"] if "progress" in state else state["books"]  # its name in older versions
            self.epoch = progress["epoch"]
            self.updates = progress["updates"]
            self.stale = progress["stale"]
            self.accuracy = progress["accuracy"]
            self.images_applied = progress["images_applied"]
            if progress["left"] is not None:
                self.assignments = {None: progress["left"]}  # belongs to no trainer yet
            self.server.restore(state)
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise UserError(f"cannot go on from {self.args.checkpoint}: {error}") from error
        if self.epoch < self.args.epochs:
            self.report.say(f"Going on from update {self.updates}, epoch {self.epoch + 1}")
        else:
            self.report.say(report.NOTHING_LEFT)

    # ---------------------------------------------------------------------- between two assignments

    def go_on_if_everybody_is_here(self):
        """If all living trainers are waiting: end the epoch if it is over, and answer with the next assignments."""
        with self.lock:
            if not self.is_everybody_here():
                return
            waiting = self.waiting
            self.waiting = {}
        if self.started:
            self.seconds += time.perf_counter() - self.started
        if self.batches_left() == []:
            self.finish_epoch()
        elif self.later and not any(self.assignments.values()):
            self.evaluate()
            self.report.say(f"Epoch {self.epoch + 1}, update {self.updates}: Accuracy {self.accuracy:.4f}")
        answers = {}
        if self.epoch < self.args.epochs:
            lr = self.learning_rate()
            self.assign_batches()
            self.server.start_assignments(lr)
            for trainer, batches in self.assignments.items():
                answers[trainer] = Assignment(self.epoch, lr, batches.copy())
        self.started = time.perf_counter()
        for trainer, future in waiting.items():
            future.set_result(answers.get(trainer))

    def is_everybody_here(self):
        """Return whether all living trainers, at least one, wait for an assignment.  Called under the lock."""
        return bool(self.living) and self.living <= self.waiting.keys()

    def finish_epoch(self):
        """Evaluate, print the epoch's result, save a checkpoint, and start the next epoch.  All trainers wait."""
        weights = self.evaluate()
        self.epoch += 1
        self.assignments = None
        # No seconds: this run was resumed after the last update of the epoch, and has trained nothing yet.
        speed = f"{self.images / self.seconds:,.0f} images/s, " if self.seconds else ""
        figures = report.staleness_figures(self.stale)
        staleness = f"staleness mean {figures['staleness_mean']:.2f} max {figures['staleness_max']}"
        self.report.say(f"Epoch {self.epoch}: Accuracy {self.accuracy:.4f}, {speed}{self.updates} updates, {staleness}")
        if self.args.checkpoint:
            self.save_soon(lambda: weights)
            self.last_save.result()

    def evaluate(self):
        """Measure the accuracy on the test images.  Return the result of capture().  All trainers wait."""
        weights = self.server.capture()
        self.accuracy = get_accuracy(self.server.model, self.test_images, self.test_labels)
        self.report.scalar("test accuracy", self.accuracy, self.updates)
        return weights

    def assign_batches(self):
        """Assign the epoch's remaining batches, up to the next evaluation, to the living trainers."""
        left = self.batches_left()
        if left is None:
            left = self.batches_of_an_epoch()
            self.images_applied.append(0)
        part = math.ceil(len(self.batches_of_an_epoch()) / self.args.evaluations)
        end = (left[0] // part + 1) * part  # of the part that has the first remaining batch
        now = [batch for batch in left if batch < end]
        self.later = [batch for batch in left if batch >= end]
        living = sorted(self.living)
        self.assignments = {trainer: now[place :: len(living)] for place, trainer in enumerate(living)}

    def batches_of_an_epoch(self):
        """Return the numbers of all batches that the trainers do together in an epoch."""
        count = self.batches_per_epoch
        if self.args.max_batches:
            count = min(count, self.args.max_batches * len(trainers(self.args)))
        return list(range(count))

    def learning_rate(self):
        """Return the learning rate of this epoch."""
        if not self.args.lr_step:
            return self.args.lr
        return self.args.lr * 0.1 ** (self.epoch // self.args.lr_step)

    # ---------------------------------------------------------------------- what is left, and what is saved

    def batches_left_of(self, trainer):
        """Return the numbers of the batches that a trainer still has to do."""
        return (self.assignments or {}).get(trainer, [])

    def batches_left(self):
        """Return the numbers of this epoch's batches that are not applied yet, or None if it has not begun."""
        if self.assignments is None:
            return None
        return sorted(itertools.chain(self.later, *self.assignments.values()))

    def progress(self):
        """Return a copy of the progress, for a checkpoint."""
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "stale": self.stale.copy(),
            "accuracy": self.accuracy,
            "images_applied": self.images_applied.copy(),
            "left": self.batches_left(),
        }

    def save(self, progress, get_weights):
        """Write --checkpoint.  Runs on the writer thread."""
        state = {"progress": progress} | get_weights()
        checkpoint.save(self.args.checkpoint, "param_server", self.settings, state)


def write_result(done, lost):
    """Write --summary_json and --plot; return the summary.  `done`: the Scoreboard.

    Called on rank 0, after all living trainers have finished.
    """
    done.bar.close()
    figures = {"dataset": done.args.dataset, "test_accuracy": done.accuracy, "updates": done.updates, "lost": lost}
    figures["images_per_second"] = round(done.images / done.seconds, 1) if done.seconds else None
    figures["images_applied"] = done.images_applied
    figures |= report.staleness_figures(done.stale)
    curves = {
        "loss (nats)": {"loss": "training, one batch"},
        "accuracy (fraction)": {"test accuracy": "test images"},
    }
    return done.report.close(curves, "updates of the weights", **figures)


@torch.no_grad()
def get_accuracy(net, images, labels, batch_size=500):
    """Return the fraction of images (N, 28, 28) uint8 that `net` classifies correctly.

    Runs in the process that has the network. In the tutorial, eval() is called on the trainers' TrainerNet. It does not
    reach the network on the server, whose dropout stays on.
    """
    net.eval()
    device = next(net.parameters()).device
    correct = 0
    with all_cores():  # no trainer computes now
        for batch, target in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            correct += (net(normalised(batch.to(device))).argmax(dim=1).cpu() == target).sum().item()
    return correct / len(labels)
