"""What a run prints and writes: losses, accuracy, a progress bar, the summary and the picture.

Runs in rank 0, where the Coordinator calls it.
"""

import collections
import time

from glue import report


class Progress:
    """The output of one run. The Coordinator calls start(), then after_step() for each gradient, and finish()."""

    def __init__(self, args):
        self.dataset = args.dataset
        self.report = report.Report("param_server", args)
        self.bar = self.report.progress(unit="image")
        # These are in a checkpoint:
        self.stale = collections.Counter()  # {staleness: number of gradients that had it}
        self.accuracy = None
        self.images_applied = []  # number of images applied to the weights, for each epoch
        # These count from the start of this process:
        self.images = 0
        self.seconds = 0.0  # in which trainers worked
        self.working_since = None

    def state_dict(self):
        return {
            "stale": self.stale.copy(),
            "accuracy": self.accuracy,
            "images_applied": self.images_applied.copy(),
        }

    def load_state_dict(self, state):
        self.stale = state["stale"]
        self.accuracy = state["accuracy"]
        self.images_applied = state["images_applied"]

    def start(self, updates, epoch, nothing_left):
        """Say from where a resumed run goes on."""
        if nothing_left:
            self.report.say(report.NOTHING_LEFT)
        else:
            self.report.say(f"Going on from update {updates}, epoch {epoch + 1}")

    def trainers_work(self):
        self.working_since = time.perf_counter()

    def trainers_wait(self):
        if self.working_since is not None:
            self.seconds += time.perf_counter() - self.working_since
        self.working_since = None

    def after_step(self, images, staleness):
        """Count a gradient that was applied to the weights."""
        self.stale[staleness] += 1
        self.images_applied[-1] += images
        self.images += images
        self.bar.update(images)

    def loss(self, trainer, batch, loss, updates):
        """Print the loss of one batch, in the tutorial's words."""
        self.report.say(f"Rank {trainer} training batch {batch} loss {loss}")
        self.report.scalar("loss", loss, updates)

    def after_evaluation(self, accuracy, updates):
        self.accuracy = accuracy
        self.report.scalar("test accuracy", accuracy, updates)

    def within_epoch(self, epoch, updates):
        """Print the accuracy of an evaluation before the epoch's end."""
        self.report.say(f"Epoch {epoch}, update {updates}: Accuracy {self.accuracy:.4f}")

    def after_epoch(self, epoch, updates):
        """Print the result of an epoch."""
        # No seconds: this run was resumed after the last update of the epoch, and has trained nothing yet.
        speed = f"{self.images / self.seconds:,.0f} images/s, " if self.seconds else ""
        figures = report.staleness_figures(self.stale)
        staleness = f"staleness mean {figures['staleness_mean']:.2f} max {figures['staleness_max']}"
        self.report.say(f"Epoch {epoch}: Accuracy {self.accuracy:.4f}, {speed}{updates} updates, {staleness}")

    def finish(self, updates, lost):
        """Write --summary_json and --plot; return the summary."""
        self.bar.close()
        return self.report.close(
            plot={
                "loss (nats)": {"loss": "training, one batch"},
                "accuracy (fraction)": {"test accuracy": "test images"},
            },
            xlabel="updates of the weights",
            dataset=self.dataset,
            test_accuracy=self.accuracy,
            updates=updates,
            lost=sorted(lost),
            images_per_second=round(self.images / self.seconds, 1) if self.seconds else None,
            images_applied=self.images_applied,
            **report.staleness_figures(self.stale),
        )
