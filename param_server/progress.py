"""What a run prints and writes: losses, accuracy, a progress bar, curves, checkpoints, and the result. In rank 0."""

from glue import UserError, checkpoint, report


class Progress:
    """The output of one run. The Coordinator calls start(), then after_step() for each gradient; main.py finish()."""

    def __init__(self, args, coordinator, resume_keys):
        """`resume_keys`: flags that must be equal in a run that continues from a checkpoint of this one."""
        self.args = args
        self.coordinator = coordinator
        self.report = report.Report("param_server", args)
        self.settings = {key: vars(args)[key] for key in resume_keys}
        # Since the start of this process:
        self.images = 0  # applied to the weights
        self.seconds = 0.0  # in which the trainers worked

    def start(self):
        """With --resume, load the checkpoint. Return the batches left of the epoch that was begun, or None."""
        left = None
        if state := checkpoint.resume(self.args, "param_server", self.settings):
            try:
                left = self.coordinator.load_state_dict(state)
            except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
                raise UserError(f"cannot go on from {self.args.checkpoint}: {error}") from error
            epoch, epochs = self.coordinator.epoch, self.args.epochs
            self.report.say(f"Going on after update {self.coordinator.updates}, with {epoch} of {epochs} epochs done.")
            if epoch >= epochs:
                self.report.say(report.NOTHING_LEFT)
        self.bar = self.report.progress(unit="image")
        return left

    def after_step(self, images):
        """Count a gradient of so many images that was applied to the weights."""
        self.images += images
        self.bar.update(images)

    def loss(self, trainer, batch, loss):
        """Print the loss of one batch, in the tutorial's words."""
        self.report.say(f"Rank {trainer} training batch {batch} loss {loss}")
        self.report.scalar("loss", loss, self.coordinator.updates)

    def after_evaluation(self):
        self.report.scalar("test accuracy", self.coordinator.accuracy, self.coordinator.updates)

    def within_epoch(self):
        """Print the accuracy of an evaluation before the epoch's end."""
        job = self.coordinator
        self.report.say(f"Epoch {job.epoch + 1}, update {job.updates}: Accuracy {job.accuracy:.4f}")

    def after_epoch(self):
        """Print the result of an epoch."""
        job = self.coordinator
        # No seconds: this run was resumed after the last update of the epoch, and has trained nothing yet.
        speed = f"{self.images / self.seconds:,.0f} images/s, " if self.images else ""
        figures = report.staleness_figures(job.stale)
        staleness = f"staleness mean {figures['staleness_mean']:.2f} max {figures['staleness_max']}"
        self.report.say(f"Epoch {job.epoch}: Accuracy {job.accuracy:.4f}, {speed}{job.updates} updates, {staleness}")

    def save(self, state):
        """Write the checkpoint, if the command line asks for it."""
        if self.args.checkpoint:
            checkpoint.save(self.args.checkpoint, "param_server", self.settings, state)

    def finish(self, lost):
        """Write the summary and the picture, if the command line asks for them."""
        job = self.coordinator
        self.bar.close()
        self.report.close(
            plot={
                "loss (nats)": {"loss": "training, one batch"},
                "accuracy (fraction)": {"test accuracy": "test images"},
            },
            xlabel="updates of the weights",
            dataset=self.args.dataset,
            test_accuracy=job.accuracy,
            updates=job.updates,
            lost=sorted(lost),
            images_per_second=round(self.images / self.seconds, 1) if self.images else None,
            images_applied=job.images_applied,
            **report.staleness_figures(job.stale),
        )
