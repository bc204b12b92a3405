"""What the job has done so far: updates, every trainer's place in the epoch, staleness, accuracy, checkpoints.

Lives on rank 0, one for the job, beside the parameter server.  The trainers call next_epoch and record_loss; the
server calls count_update.  It works alike for both modes, and knows nothing of how the weights are kept.
"""

import threading
import time

import torch
import torch.distributed.rpc as rpc

import rpc_names
from glue import checkpoint, placement, report
from mnist_data import load_digits, normalised

SCENARIO = "param_server"
# A checkpoint means the same only with the same of these: a place in an epoch is counted in batches per trainer.
SETTINGS = ("mode", "world_size", "num_servers", "dataset", "seed", "batch_size", "max_batches", "sync_every")


class Scoreboard:
    """The books of one job.  `server` gives capture(), restore(state), start_epoch(epoch), and net_to_evaluate()."""

    def __init__(self, args, server):
        self.args, self.server = args, server
        self.lock = threading.Lock()  # for what two trainers may touch at once
        self.trainers = rpc_names.trainers(args)
        self.epoch = self.updates = 0
        self.batches_done = dict.fromkeys(self.trainers, 0)  # in this epoch, applied to the weights
        self.staleness_sum = self.staleness_max = 0
        self.images = self.seconds = self.bytes = 0  # since this process started
        self.accuracy = None
        self.waiting = {}  # trainer -> Future, at the line between two epochs
        self.epoch_started = None
        self.test_images, self.test_labels = load_digits(args, train=False)
        self.report = report.Report(SCENARIO, args)
        self._restore()
        self.bar = self.report.progress(unit="image")

    # ------------------------------------------------------------------------------ called by the trainers, over RPC

    @rpc.functions.async_execution
    def next_epoch(self, trainer):
        """Return (epoch, first batch) for `trainer` once all trainers are here, or None when the work is done.

        The Future that is returned here becomes the caller's answer when somebody completes it, so that waiting
        trainers hold no RPC thread. May be called by all trainers at once (locked); whoever comes last evaluates, in
        its own call, while all others wait: so nobody trains meanwhile.
        """
        answer = torch.futures.Future()
        with self.lock:
            self.waiting[trainer] = answer
            if len(self.waiting) < len(self.trainers):
                return answer
            waiting, self.waiting = self.waiting, {}
        if self.epoch_started is not None:
            self._finish_epoch()
        done = self.epoch >= self.args.epochs
        if not done:
            self.server.start_epoch(self.epoch)
            self.epoch_started = time.perf_counter()
        for trainer, future in waiting.items():
            future.set_result(None if done else (self.epoch, self.batches_done[trainer]))
        return answer

    def record_loss(self, trainer, batch, loss):
        """Print the tutorial's line for one batch.  May be called by all trainers at once (locked)."""
        with self.lock:
            self.report.say(f"Rank {trainer} training batch {batch} loss {loss}")
            self.report.scalar("loss", loss, self.updates)
            self.bar.set_postfix_str(f"loss {loss:.3f}")

    # ------------------------------------------------------------------------------------------ called by the server

    def count_update(self, gradients, num_bytes):
        """Note one update of the weights.  Called under the server's lock, right after it changed them.

        `gradients`: (trainer, staleness, images, batches) of each gradient in the update; `num_bytes`: tensor bytes
        that crossed the wire for it. Staleness: the number of updates between reading the weights and this one.
        """
        self.updates += 1
        self.bytes += num_bytes
        for trainer, staleness, images, batches in gradients:
            self.batches_done[trainer] += batches
            self.staleness_sum += staleness / len(gradients)
            self.staleness_max = max(self.staleness_max, staleness)
            self.images += images
            self.bar.update(images)
        if self.updates % self.args.checkpoint_every == 0:
            self.save()

    def save(self):
        """Write --checkpoint, if asked for: weights and books of the same moment, as the server's lock is held."""
        if self.args.checkpoint:
            books = {
                name: getattr(self, name)
                for name in ("epoch", "updates", "batches_done", "staleness_sum", "staleness_max", "accuracy")
            }
            settings = {name: getattr(self.args, name) for name in SETTINGS}
            state = {"settings": settings, "books": books} | self.server.capture()
            checkpoint.save(self.args.checkpoint, SCENARIO, state)

    def close(self):
        """Say and write the result of the job: rank 0, after every trainer has finished."""
        self.bar.close()
        return self.report.close(
            plot=("loss", "test accuracy"),
            xlabel="updates",
            dataset=self.args.dataset,
            test_accuracy=self.accuracy,
            images_per_second=round(self.images / self.seconds, 1) if self.seconds else None,
            updates=self.updates,
            staleness_mean=round(self.staleness_sum / max(1, self.updates), 3),
            staleness_max=self.staleness_max,
            wire_bytes_per_step=round(self.bytes / self.images * self.args.batch_size) if self.images else None,
        )

    # ------------------------------------------------------------------------------------------------------- helpers

    def _restore(self):
        state = checkpoint.load(self.args, SCENARIO)
        if state is None:
            return
        try:
            for name, value in state["settings"].items():
                if value != getattr(self.args, name):
                    raise ValueError(f"it was made with --{name} {value}, this run has {getattr(self.args, name)}")
            self.server.restore(state)
            for name, value in state["books"].items():
                setattr(self, name, value)
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise ValueError(f"cannot go on from {self.args.checkpoint}: {error}") from error
        self.report.say(f"Going on from update {self.updates}, epoch {self.epoch + 1}")

    def _finish_epoch(self):
        """Evaluate, tell, and turn the page.  All trainers wait for this."""
        self.seconds += time.perf_counter() - self.epoch_started
        self.accuracy = evaluate(self.server.net_to_evaluate(), self.test_images, self.test_labels)
        self.epoch += 1
        self.batches_done = dict.fromkeys(self.trainers, 0)
        self.report.scalar("test accuracy", self.accuracy, self.updates)
        self.report.say(
            f"Epoch {self.epoch}: Accuracy {self.accuracy:.4f}, {self.images / self.seconds:,.0f} images/s, "
            f"{self.updates} updates, staleness mean {self.staleness_sum / max(1, self.updates):.2f} "
            f"max {self.staleness_max}"
        )
        self.save()


@torch.no_grad()
def evaluate(net, images, labels, batch_size=500):
    """Return the fraction of images (N, 28, 28) uint8 that `net` reads right, in eval mode (no dropout).

    Here, where the network is: in the tutorial the trainer calls model.eval() on its TrainerNet, which has no
    parameters and no dropout; the network behind the RRef stays in training mode and is measured with dropout on.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(placement.usable_cores())  # nobody trains now: take every core
    was_training = net.training
    net.eval()
    first = next(net.parameters()).device
    right = 0
    for batch, target in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        predicted = net(normalised(batch.to(first))).argmax(dim=1)
        right += (predicted.cpu() == target).sum().item()
    net.train(was_training)
    torch.set_num_threads(threads)
    return right / len(labels)
