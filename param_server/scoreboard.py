"""What the job has done so far: updates, what is left of the epoch, staleness, accuracy, checkpoints.

Lives on rank 0, one for the job, beside the parameter server.  The trainers call next_assignment and record_loss; the
server calls batch_of, at_work and count_update.  It works alike for both modes, and does not know how the weights are
kept.
"""

import collections
import concurrent.futures
import itertools
import math
import statistics
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed.rpc as rpc

from glue import PermanentError, checkpoint, report
from glue.tensors import all_cores
from mnist_data import load_digits, normalised
from rpc_names import trainers

# A run that goes on from a checkpoint must have the same.
SETTINGS = ("seed", "mode", "dataset", "batch_size", "max_batches", "sync_every")


@dataclass
class Assignment:
    """What a trainer is to do next."""

    epoch: int  # from 0
    lr: float
    batches: list  # their numbers


@dataclass
class Work:
    """What a gradient is of."""

    trainer: int
    version: int  # of the weights that it was computed on: how many updates had made them
    images: int
    batches: int


class Scoreboard:
    """The progress of one job.

    An epoch's batches are assigned to the trainers that are there; a batch is struck from its trainer's assignment when
    it is applied to the weights. What is left when all have done theirs, of a trainer that was lost, is assigned again
    to the living; so is what is left in a checkpoint, to those that go on from it. No result depends on which
    trainer has which batch.

    `server` gives capture(), restore(state), start_assignments(lr), forget(trainer), and `model`, as last captured.

    Checkpoints are written by a thread of their own, in the order in which they became due: a disk may be slow, and
    nobody has to wait for it but the end of an epoch.
    """

    def __init__(self, args, server):
        self.args = args
        self.server = server
        self.settings = {name: vars(args)[name] for name in SETTINGS}
        self.lock = threading.Lock()  # for what two trainers may touch at once
        # What a checkpoint keeps:
        self.epoch = 0
        self.updates = 0
        self.stale = collections.Counter()  # staleness -> how many gradients had it
        self.accuracy = None
        self.images_applied = []  # to the weights, by epoch
        # Trainer -> numbers of the batches that it has still to do.  None: this epoch's are not assigned yet.
        self.assignments = None
        self.later = []  # numbers of the batches of this epoch that come after the next evaluation
        # Since this process started:
        self.living = set(trainers(args))
        self.images = 0
        self.seconds = 0.0
        self.started = None  # when the trainers got their assignments
        self.batches_per_epoch = None
        self.figures = {}  # trainer -> what its Meter says
        self.waiting = {}  # trainer -> Future of its next Assignment
        self.writer = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self.last_save = None  # Future of the checkpoint that the writer was given last
        self.test_images, self.test_labels = load_digits(args.dataset, args.data_dir, args.seed, train=False)
        self.report = report.Report("param_server", args)
        self.bar = self.report.progress(unit="image")

    # ---------------------------------------------------------------------- called by the trainers, over RPC

    @rpc.functions.async_execution
    def next_assignment(self, trainer, batches_per_epoch, figures):
        """Return an Assignment once all living trainers are here, or None: the work is done.

        `figures`: what its steps have cost so far (Meter.figures). The caller gets the answer when somebody completes
        this Future, so that waiting trainers hold no RPC thread. May be called by all trainers at once (locked); the
        trainer that comes last evaluates, in its own call, while all others wait.
        """
        answer = torch.futures.Future()
        with self.lock:
            if trainer in self.waiting:
                raise RuntimeError(f"trainer_{trainer} asked for batches before its last request was answered")
            self.figures[trainer] = figures
            self.batches_per_epoch = batches_per_epoch
            self.waiting[trainer] = answer
        self.go_on_if_everybody_is_here()
        return answer

    def record_loss(self, trainer, batch, loss):
        """Print the tutorial's line for one batch.  May be called by all trainers at once (locked)."""
        with self.lock:
            self.report.say(f"Rank {trainer} training batch {batch} loss {loss}")
            self.report.scalar("loss", loss, self.updates)

    # ---------------------------------------------------------------------- called by the server, in this process

    def batch_of(self, trainer):
        """Return the (epoch, batch) that a trainer is at.  A process that was stopped, and wakes up, is refused."""
        if trainer not in self.living:
            raise RuntimeError(f"trainer_{trainer} was lost; its work has gone to the others")
        batches = self.batches_left_of(trainer)
        if not batches:
            raise RuntimeError(f"trainer_{trainer} has done its batches, and sent the work of one more")
        return self.epoch, batches[0]

    def at_work(self):
        """Return the living trainers whose assignments are not done.  Under the server's lock."""
        return {trainer for trainer in self.living if self.batches_left_of(trainer)}

    def count_update(self, works):
        """Note one update of the weights, by gradients of these Works; return whether a checkpoint is due.

        Called under the server's lock, before anybody can read the weights after it. If a checkpoint is due, the server
        calls save_soon().
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
        """Return True every --checkpoint_every updates, if the last one is written.  Raises what went wrong with it."""
        if self.last_save:
            if not self.last_save.done():
                return False
            self.last_save.result()
        return bool(self.args.checkpoint) and self.updates % self.args.checkpoint_every == 0

    def save_soon(self, get_weights):
        """Let the writer save the progress of this moment, and the weights of this moment, which get_weights() returns.

        Called where neither can change: under the server's lock, or while all trainers wait.
        """
        self.last_save = self.writer.submit(self.save, self.progress(), get_weights)

    # ---------------------------------------------------------------------- called by the job

    def drop(self, trainer):
        """Go on without a trainer that was lost; return what becomes of its work."""
        self.server.forget(trainer)  # from here on nothing that it sends is applied
        left = len(self.batches_left_of(trainer))
        self.go_on_if_everybody_is_here()
        return f"batches of this epoch that go to the others: {left}" if left else ""

    def resume(self):
        """Go on from --checkpoint, if --resume says so.  Before RPC begins."""
        state = checkpoint.resume(self.args, "param_server", self.settings)
        if state is None:
            return
        try:
            progress = state["progress"] if "progress" in state else state["books"]  # as older versions called it
            self.epoch = progress["epoch"]
            self.updates = progress["updates"]
            self.stale = progress["stale"]
            self.accuracy = progress["accuracy"]
            self.images_applied = progress["images_applied"]
            if progress["left"] is not None:
                self.assignments = {None: progress["left"]}  # nobody's
            self.server.restore(state)
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise PermanentError(f"cannot go on from {self.args.checkpoint}: {error}") from error
        if self.epoch < self.args.epochs:
            self.report.say(f"Going on from update {self.updates}, epoch {self.epoch + 1}")
        else:
            self.report.say(report.NOTHING_LEFT)

    # ---------------------------------------------------------------------- between two assignments

    def go_on_if_everybody_is_here(self):
        """Once all living trainers wait: end the epoch if it is over, and give them their next assignments."""
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
        tasks = {}
        if self.epoch < self.args.epochs:
            lr = self.learning_rate()
            self.assign_batches()
            self.server.start_assignments(lr)
            tasks = {who: Assignment(self.epoch, lr, batches.copy()) for who, batches in self.assignments.items()}
        self.started = time.perf_counter()
        for trainer, future in waiting.items():
            future.set_result(tasks.get(trainer))

    def is_everybody_here(self):
        """Return whether all living trainers wait for an assignment, and there are any.  Under the lock."""
        return bool(self.living) and self.living <= self.waiting.keys()

    def finish_epoch(self):
        """Evaluate, tell, and turn the page.  All trainers wait for this."""
        weights = self.evaluate()
        self.epoch += 1
        self.assignments = None
        # Nothing was trained yet where this goes on from a checkpoint of the epoch's last update.
        speed = f"{self.images / self.seconds:,.0f} images/s, " if self.seconds else ""
        figures = report.staleness_figures(self.stale)
        staleness = f"staleness mean {figures['staleness_mean']:.2f} max {figures['staleness_max']}"
        self.report.say(f"Epoch {self.epoch}: Accuracy {self.accuracy:.4f}, {speed}{self.updates} updates, {staleness}")
        if self.args.checkpoint:
            self.save_soon(lambda: weights)
            self.last_save.result()

    def evaluate(self):
        """Measure the accuracy on the test images; return the weights, as capture() gave them.  All trainers wait."""
        weights = self.server.capture()
        self.accuracy = get_accuracy(self.server.model, self.test_images, self.test_labels)
        self.report.scalar("test accuracy", self.accuracy, self.updates)
        return weights

    def assign_batches(self):
        """Share what is left of the epoch, or a new epoch, among the living: up to the next evaluation."""
        left = self.batches_left()
        if left is None:
            left = self.batches_of_an_epoch()
            self.images_applied.append(0)
        part = math.ceil(len(self.batches_of_an_epoch()) / self.args.evaluations)
        end = (left[0] // part + 1) * part  # of the part that the first batch belongs to
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
        """Return the numbers of the batches that a trainer has still to do."""
        return (self.assignments or {}).get(trainer, [])

    def batches_left(self):
        """Return the batches of this epoch that are not applied yet, or None if it has not begun."""
        if self.assignments is None:
            return None
        return sorted(itertools.chain(self.later, *self.assignments.values()))

    def progress(self):
        """Return a copy of what a checkpoint keeps."""
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "stale": self.stale.copy(),
            "accuracy": self.accuracy,
            "images_applied": self.images_applied.copy(),
            "left": self.batches_left(),
        }

    def save(self, progress, get_weights):
        """Write --checkpoint.  Runs on the writer's thread."""
        state = {"progress": progress} | get_weights()
        checkpoint.save(self.args.checkpoint, "param_server", self.settings, state)


def write_result(done, lost):
    """Say and write the result of the job: rank 0, after every living trainer has finished.  `done`: the Scoreboard."""
    done.bar.close()
    figures = {"dataset": done.args.dataset, "test_accuracy": done.accuracy, "updates": done.updates, "lost": lost}
    figures["images_per_second"] = round(done.images / done.seconds, 1) if done.seconds else None
    figures["images_applied"] = done.images_applied
    figures |= report.staleness_figures(done.stale)
    for name in ("rpc_calls_per_step", "wire_bytes_per_step"):  # the mean over the trainers, if they have it
        values = [measured[name] for measured in done.figures.values()]
        figures[name] = None if None in values else round(statistics.mean(values), 2)
    curves = {
        "loss (nats)": {"loss": "training, one batch"},
        "accuracy (fraction)": {"test accuracy": "test images"},
    }
    counts = "staleness (updates since reading)", done.stale
    return done.report.close(curves, "updates of the weights", counts=counts, **figures)


@torch.no_grad()
def get_accuracy(net, images, labels, batch_size=500):
    """Return the fraction of images (N, 28, 28) uint8 that `net` reads right.

    Here, where it is: eval() of the tutorial's TrainerNet does not reach the network behind the RRef, and its dropout.
    """
    net.eval()
    device, right = next(net.parameters()).device, 0
    with all_cores():  # nobody trains now
        for batch, target in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            right += (net(normalised(batch.to(device))).argmax(dim=1).cpu() == target).sum().item()
    return right / len(labels)
