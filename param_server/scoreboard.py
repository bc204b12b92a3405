"""What the job has done so far: updates, every trainer's place in the epoch, staleness, accuracy, checkpoints.

Lives on rank 0, one for the job, beside the parameter server.  The trainers call next_epoch and record_loss; the
server calls count_update.  It works alike for both modes, and knows nothing of how the weights are kept.
"""

import statistics
import threading
import time

import torch
import torch.distributed.rpc as rpc

from glue import checkpoint, report
from glue.placement import all_cores
from mnist_data import load_digits, normalised
from rpc_names import trainers

SCENARIO = "param_server"
# A checkpoint means the same only with the same of these: a place in an epoch is counted in batches per trainer.
SETTINGS = ("mode", "dataset", "seed", "batch_size", "max_batches", "sync_every")
BOOKS = ("epoch", "updates", "staleness_sum", "staleness_max", "accuracy")


class Scoreboard:
    """The books of one job.  `server` gives capture(), restore(state), start_epoch(lr), and net_to_evaluate()."""

    def __init__(self, args, server):
        self.args, self.server = args, server
        self.lock = threading.Lock()  # for what two trainers may touch at once
        self.trainers = trainers(args)
        self.epoch = self.updates = 0
        self.batches_done = dict.fromkeys(self.trainers, 0)  # in this epoch, applied to the weights
        self.staleness_sum = self.staleness_max = 0
        self.images = self.seconds = 0  # since this process started
        self.accuracy = self.epoch_started = None
        self.figures = {}  # trainer -> what its Meter says
        self.waiting = {}  # trainer -> Future, at the line between two epochs
        self.saving = False
        self.test_images, self.test_labels = load_digits(args.dataset, args.data_dir, args.seed, train=False)
        self.report = report.Report(SCENARIO, args)
        self._restore()
        self.bar = self.report.progress(unit="image")

    # ---------------------------------------------------------------------- called by the trainers, over RPC

    @rpc.functions.async_execution
    def next_epoch(self, trainer, figures):
        """Return (epoch, first batch) for `trainer` once all trainers are here, or None when the work is done.

        `figures`: what its steps have cost so far (Meter.figures). The caller gets the answer when somebody completes
        this Future, so that waiting trainers hold no RPC thread. May be called by all trainers at once (locked);
        whoever comes last evaluates, in its own call, while all others wait.
        """
        answer = torch.futures.Future()
        with self.lock:
            self.figures[trainer] = figures
            self.waiting[trainer] = answer
            if len(self.waiting) < len(self.trainers):
                return answer
            waiting, self.waiting = self.waiting, {}
        if self.epoch_started is not None:
            self._finish_epoch()
        done = self.epoch >= self.args.epochs
        if not done:
            self.server.start_epoch(learning_rate(self.args.lr, self.args.lr_step, self.epoch))
            self.epoch_started = time.perf_counter()
        for each, future in waiting.items():
            future.set_result(None if done else (self.epoch, self.batches_done[each]))
        return answer

    def record_loss(self, trainer, batch, loss):
        """Print the tutorial's line for one batch.  May be called by all trainers at once (locked)."""
        with self.lock:
            self.report.say(f"Rank {trainer} training batch {batch} loss {loss}")
            self.report.scalar("loss", loss, self.updates)
            self.bar.set_postfix_str(f"loss {loss:.3f}")

    # ---------------------------------------------------------------------- called by the server

    def count_update(self, gradients):
        """Note one update of the weights.  Called under the server's lock, right after it changed them.

        `gradients`: (trainer, staleness, images, batches) of each gradient in it; staleness: the updates between
        reading the weights and this one. Return the books to save() if a checkpoint is due (and none being written).
        """
        self.updates += 1
        for trainer, staleness, images, batches in gradients:
            self.batches_done[trainer] += batches
            self.staleness_sum += staleness / len(gradients)
            self.staleness_max = max(self.staleness_max, staleness)
            self.images += images
            self.bar.update(images)
        if not self.args.checkpoint or self.saving or self.updates % self.args.checkpoint_every:
            return None
        self.saving = True
        return self._books()

    def save(self, books, weights):
        """Write --checkpoint: books, and the weights of the same moment (the server's capture())."""
        settings = {name: vars(self.args)[name] for name in SETTINGS} | {"trainers": len(self.trainers)}
        checkpoint.save(self.args.checkpoint, SCENARIO, {"settings": settings, "books": books} | weights)
        self.saving = False

    def close(self):
        """Say and write the result of the job: rank 0, after every trainer has finished."""
        self.bar.close()
        costs = {name: self._mean(name) for name in ("rpc_calls_per_step", "wire_bytes_per_step")}
        return self.report.close(
            plot=("loss", "test accuracy"),
            xlabel="updates",
            dataset=self.args.dataset,
            test_accuracy=self.accuracy,
            images_per_second=round(self.images / self.seconds, 1) if self.seconds else None,
            updates=self.updates,
            staleness_mean=round(self.staleness_sum / max(1, self.updates), 3),
            staleness_max=self.staleness_max,
            **costs,
        )

    def _mean(self, figure):
        """Return the mean of a figure over the trainers, or None if they do not have it."""
        values = [figures[figure] for figures in self.figures.values()]
        return None if None in values else round(statistics.mean(values), 2)

    def _books(self):
        """Return a copy of what a checkpoint keeps; places in the order of the trainers, whatever their ranks."""
        return {name: vars(self)[name] for name in BOOKS} | {"places": list(self.batches_done.values())}

    def _restore(self):
        state = checkpoint.load(self.args, SCENARIO)
        if state is None:
            return
        mine = vars(self.args) | {"trainers": len(self.trainers)}
        try:
            for name, value in state["settings"].items():
                if value != mine[name]:
                    raise ValueError(f"it was made with {name} {value}, this run has {mine[name]}")
            self.server.restore(state)
            vars(self).update({name: state["books"][name] for name in BOOKS})
            self.batches_done = dict(zip(self.trainers, state["books"]["places"], strict=True))
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise ValueError(f"cannot go on from {self.args.checkpoint}: {error}") from error
        self.report.say(f"Going on from update {self.updates}, epoch {self.epoch + 1}")

    def _finish_epoch(self):
        """Evaluate, tell, and turn the page.  All trainers wait for this."""
        self.seconds += time.perf_counter() - self.epoch_started
        self.accuracy = get_accuracy(self.server.net_to_evaluate(), self.test_images, self.test_labels)
        self.epoch += 1
        self.batches_done = dict.fromkeys(self.trainers, 0)
        self.report.scalar("test accuracy", self.accuracy, self.updates)
        speed = f"{self.images / self.seconds:,.0f} images/s, {self.updates} updates"
        staleness = f"staleness mean {self.staleness_sum / max(1, self.updates):.2f} max {self.staleness_max}"
        self.report.say(f"Epoch {self.epoch}: Accuracy {self.accuracy:.4f}, {speed}, {staleness}")
        if self.args.checkpoint:
            self.save(self._books(), self.server.capture())


def learning_rate(lr, lr_step, epoch):
    """Return --lr, divided by 10 after every --lr_step epochs."""
    return lr * 0.1 ** (epoch // lr_step) if lr_step else lr


@torch.no_grad()
def get_accuracy(net, images, labels, batch_size=500):
    """Return the fraction of images (N, 28, 28) uint8 that `net` reads right, in eval mode (no dropout).

    Here, where the network is: the tutorial's trainer calls eval() on its TrainerNet, which the network behind the RRef
    does not notice.
    """
    was_training = net.training
    net.eval()
    device, right = next(net.parameters()).device, 0
    with all_cores():  # nobody trains now
        for batch, target in zip(images.split(batch_size), labels.split(batch_size), strict=True):
            predicted = net(normalised(batch.to(device))).argmax(dim=1)
            right += (predicted.cpu() == target).sum().item()
    net.train(was_training)
    return right / len(labels)
