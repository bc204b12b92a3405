"""What the job has done so far: updates, what is left of the epoch, staleness, accuracy, checkpoints.

Lives on rank 0, one for the job, beside the parameter server.  The trainers call next_lot and record_loss; the
server calls count_update.  It works alike for both modes, and knows nothing of how the weights are kept.
"""

import collections
import concurrent.futures
import copy
import itertools
import statistics
import threading
import time

import torch
import torch.distributed.rpc as rpc

from glue import PermanentError, checkpoint, report
from glue.tensors import all_cores
from mnist_data import load_digits, normalised
from rpc_names import trainers

# A run that goes on from a checkpoint must have the same.
SETTINGS = ("seed", "mode", "dataset", "batch_size", "max_batches", "sync_every")
BOOKS = ("epoch", "updates", "stale", "accuracy", "images_applied")


class Scoreboard:
    """The books of one job.

    An epoch's batches are dealt to the trainers that are there, to each a *lot*; a batch is struck from it when it is
    applied to the weights. What is left when all have done theirs (of a trainer that was lost) is dealt again, to those
    that live; so is what is left in a checkpoint, to those that go on from it. Nothing depends on who trains what.

    `server` gives capture(), restore(state), start_lots(lr), forget(trainer), and `model`, as last captured.

    Checkpoints are written by a thread of their own, in the order in which they became due: a disk may be slow, and
    nobody has to wait for it but the end of an epoch.
    """

    def __init__(self, args, server):
        self.args, self.server = args, server
        self.settings = {name: vars(args)[name] for name in SETTINGS}
        self.lock = threading.Lock()  # for what two trainers may touch at once
        self.living = set(trainers(args))
        self.lots = None  # trainer -> numbers of the batches that it has still to do; None: this epoch is not dealt yet
        self.epoch = self.updates = self.images = self.seconds = 0  # the last two: since this process started
        self.stale = collections.Counter()  # staleness -> how many gradients had it
        self.images_applied = []  # to the weights, by epoch
        self.accuracy = self.started = None
        self.figures = {}  # trainer -> what its Meter says
        self.waiting = {}  # trainer -> Future, at the line between two lots
        self.writer = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self.last_save = None  # Future of the checkpoint that the writer was given last
        self.test_images, self.test_labels = load_digits(args.dataset, args.data_dir, args.seed, train=False)
        self.report = report.Report("param_server", args)
        self._restore()
        self.bar = self.report.progress(unit="image")

    @rpc.functions.async_execution
    def next_lot(self, trainer, batches_per_epoch, figures):
        """Return (epoch, learning rate, batches to do) once all living trainers are here, or None: the work is done.

        `figures`: what its steps have cost so far (Meter.figures). The caller gets the answer when somebody completes
        this Future, so that waiting trainers hold no RPC thread. May be called by all trainers at once (locked);
        whoever comes last evaluates, in its own call, while all others wait.
        """
        answer = torch.futures.Future()
        with self.lock:
            if trainer in self.waiting:
                raise RuntimeError(f"trainer_{trainer} asked for a lot of batches before its last request was answered")
            self.figures[trainer] = figures
            self.batches_per_epoch = batches_per_epoch
            self.waiting[trainer] = answer
        self._go_on_if_all_are_here()
        return answer

    def record_loss(self, trainer, batch, loss):
        """Print the tutorial's line for one batch.  May be called by all trainers at once (locked)."""
        with self.lock:
            self.report.say(f"Rank {trainer} training batch {batch} loss {loss}")
            self.report.scalar("loss", loss, self.updates)

    def drop(self, trainer):
        """Go on without a trainer that was lost; return what becomes of its work.  Called by the job."""
        self.server.forget(trainer)  # from here on nothing that it sends is applied
        left = len(self._lot_of(trainer))
        self._go_on_if_all_are_here()
        return f"batches of this epoch that go to the others: {left}" if left else ""

    def batch_of(self, trainer):
        """Return the (epoch, batch) that a trainer is at.  A process that was stopped, and wakes up, is refused."""
        if trainer not in self.living:
            raise RuntimeError(f"trainer_{trainer} was lost; its work has gone to the others")
        if not self._lot_of(trainer):
            raise RuntimeError(f"trainer_{trainer} has done its batches, and sent the work of one more")
        return self.epoch, self._lot_of(trainer)[0]

    def count_update(self, gradients):
        """Note one update of the weights.  Called under the server's lock, under which it changes them.

        `gradients`: (trainer, staleness, images, batches) of each gradient in it; staleness: the updates between
        reading the weights and this one. Return whether a checkpoint is due: then the server calls save_soon().
        """
        self.updates += 1
        for trainer, staleness, images, batches in gradients:
            del self.lots[trainer][:batches]
            self.stale[staleness] += 1
            self.images_applied[-1] += images
            self.images += images
            self.bar.update(images)
        return self._is_checkpoint_due()

    def save_soon(self, get_weights):
        """Let the writer save the books of this moment, and the weights of this moment, which get_weights() returns.

        Called where neither can change: under the server's lock, or while all trainers wait.
        """
        self.last_save = self.writer.submit(self._save, self._books(), get_weights)

    def _is_checkpoint_due(self):
        """Return True every --checkpoint_every updates, if the last one is written.  Raises what went wrong with it."""
        if self.last_save:
            if not self.last_save.done():
                return False
            self.last_save.result()
        return bool(self.args.checkpoint) and self.updates % self.args.checkpoint_every == 0

    def _save(self, books, get_weights):
        """Write --checkpoint.  Runs on the writer's thread."""
        checkpoint.save(self.args.checkpoint, "param_server", self.settings, {"books": books} | get_weights())

    def _lot_of(self, trainer):
        """Return the numbers of the batches that a trainer has still to do."""
        return (self.lots or {}).get(trainer, [])

    def _left(self):
        """Return the batches of this epoch that are not applied yet, or None if it has not been dealt."""
        return None if self.lots is None else sorted(itertools.chain(*self.lots.values()))

    def _books(self):
        """Return a copy of what a checkpoint keeps."""
        return {name: copy.copy(vars(self)[name]) for name in BOOKS} | {"left": self._left()}

    def _restore(self):
        state = checkpoint.resume(self.args, "param_server", self.settings)
        if state is None:
            return
        try:
            self.server.restore(state)
            vars(self).update({name: state["books"][name] for name in BOOKS})
            if state["books"]["left"] is not None:
                self.lots = {None: state["books"]["left"]}  # nobody's
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise PermanentError(f"cannot go on from {self.args.checkpoint}: {error}") from error
        if self.epoch < self.args.epochs:
            self.report.say(f"Going on from update {self.updates}, epoch {self.epoch + 1}")
        else:
            self.report.say(report.NOTHING_LEFT)

    def _go_on_if_all_are_here(self):
        """Deal what is left of the epoch; if nothing is, evaluate, and deal the next one or let the trainers go."""
        with self.lock:
            if not (self.living and self.living <= self.waiting.keys()):
                return
            waiting, self.waiting = self.waiting, {}
        if self.started:
            self.seconds += time.perf_counter() - self.started
        if self._left() == []:
            self._finish_epoch()
        args, tasks = self.args, {}
        if self.epoch < args.epochs:
            left, everybody = self._left(), sorted(self.living)
            if left is None:
                left = range(self.batches_per_epoch)[: args.max_batches * len(trainers(args)) or None]
                self.images_applied.append(0)
            self.lots = {trainer: list(left[place :: len(everybody)]) for place, trainer in enumerate(everybody)}
            lr = args.lr * 0.1 ** (self.epoch // args.lr_step) if args.lr_step else args.lr
            self.server.start_lots(lr)
            tasks = {trainer: (self.epoch, lr, lot.copy()) for trainer, lot in self.lots.items()}
        self.started = time.perf_counter()
        for trainer, future in waiting.items():
            future.set_result(tasks.get(trainer))

    def _finish_epoch(self):
        """Evaluate, tell, and turn the page.  All trainers wait for this."""
        weights = self.server.capture()
        self.accuracy = get_accuracy(self.server.model, self.test_images, self.test_labels)
        self.epoch, self.lots = self.epoch + 1, None
        self.report.scalar("test accuracy", self.accuracy, self.updates)
        # Nothing was trained yet where this goes on from a checkpoint of the epoch's last update.
        speed = f"{self.images / self.seconds:,.0f} images/s, " if self.seconds else ""
        staleness = "staleness mean {:.2f} max {}".format(*mean_and_largest(self.stale))
        self.report.say(f"Epoch {self.epoch}: Accuracy {self.accuracy:.4f}, {speed}{self.updates} updates, {staleness}")
        if self.args.checkpoint:
            self.save_soon(lambda: weights)
            self.last_save.result()


def write_result(done, lost):
    """Say and write the result of the job: rank 0, after every living trainer has finished.  `done`: the Scoreboard."""
    done.bar.close()
    figures = {"dataset": done.args.dataset, "test_accuracy": done.accuracy, "updates": done.updates, "lost": lost}
    figures["images_per_second"] = round(done.images / done.seconds, 1) if done.seconds else None
    figures["images_applied"] = done.images_applied
    figures["staleness_mean"], figures["staleness_max"] = mean_and_largest(done.stale)
    for name in ("rpc_calls_per_step", "wire_bytes_per_step"):  # the mean over the trainers, if they have it
        values = [measured[name] for measured in done.figures.values()]
        figures[name] = None if None in values else round(statistics.mean(values), 2)
    curves = {"loss": "loss of a batch (nats)", "test accuracy": "accuracy on test images (fraction)"}
    counts = "staleness (updates since reading)", done.stale
    return done.report.close(curves, "updates of the weights", "loss, accuracy", counts=counts, **figures)


def mean_and_largest(stale):
    """Return (mean, largest) staleness of all gradients.  `stale`: how many had which."""
    total = sum(staleness * count for staleness, count in stale.items())
    return round(total / max(1, stale.total()), 3), max(stale, default=0)


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
