"""What a run prints and writes: losses, accuracy, a progress bar, curves, checkpoints, and the result. In server1."""

from glue import checkpoint, report


class Progress:  # in server1
    """The output of one run. main.py calls finish(), the Coordinator all the other methods."""

    def __init__(self, args, server, resume_keys):
        """`resume_keys`: flags that must be equal in a run that continues from a checkpoint of this one."""
        self.args = args
        self.server = server
        self.report = report.Report("param_server", args)
        self.settings = {key: vars(args)[key] for key in resume_keys}
        self.images = 0  # applied to the weights since the start of this process

    def start(self):
        """With --resume, load the checkpoint."""
        if state := checkpoint.resume(self.args, "param_server", self.settings):
            with checkpoint.going_on_from(self.args.checkpoint):
                self.server.load_state_dict(state)
            epoch, epochs = self.server.epoch, self.args.epochs
            self.report.say(f"Going on after update {self.server.updates}, with {epoch} of {epochs} epochs done.")
            if epoch >= epochs:
                self.report.say(report.NOTHING_LEFT)
        self.bar = self.report.progress(unit="image")

    def after_step(self, images):
        """Count a gradient of so many images that was applied to the weights."""
        self.images += images
        self.bar.update(images)

    def loss(self, trainer, batch, loss):
        """Print the loss of one batch, in the tutorial's words. Several trainers may report one at the same time."""
        self.report.say(f"Rank {trainer} training batch {batch} loss {loss}")  # without the lock: it may have to wait
        with self.server.lock:
            self.report.scalar("loss", loss, self.server.updates)

    def after_evaluation(self):
        """Print the accuracy, and, at the end of an epoch, the figures of the run; write the checkpoint."""
        server = self.server
        self.report.scalar("test accuracy", server.accuracy, server.updates)
        if server.batch:
            self.report.say(f"Epoch {server.epoch + 1}, update {server.updates}: Accuracy {server.accuracy:.4f}")
        else:
            figures = report.staleness_figures(server.stale)
            staleness = f"staleness mean {figures['staleness_mean']:.2f} max {figures['staleness_max']}"
            speed = f"{self.images / server.seconds:,.0f} images/s, " if self.images else ""
            self.report.say(
                f"Epoch {server.epoch}: Accuracy {server.accuracy:.4f}, {speed}{server.updates} updates, {staleness}"
            )
        if self.args.checkpoint:
            checkpoint.save(self.args.checkpoint, "param_server", self.settings, server.state_dict())

    def finish(self, lost):
        """Write the summary and the picture, if the command line asks for them."""
        server = self.server
        self.bar.close()
        self.report.close(
            plot={
                "loss (nats)": {"loss": "training, one batch"},
                "accuracy (fraction)": {"test accuracy": "test images"},
            },
            xlabel="updates of the weights",
            dataset=self.args.dataset,
            test_accuracy=server.accuracy,
            updates=server.updates,
            lost=sorted(lost),
            images_per_second=round(self.images / server.seconds, 1) if self.images else None,
            images_applied=list(server.images_applied.values()),  # of each epoch
            **report.staleness_figures(server.stale),
        )
