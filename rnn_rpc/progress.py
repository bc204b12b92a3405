"""Reports the progress and the result of training: lines, a progress bar, curves, and a summary.

Runs in the trainer process, called from run_trainer in main.py.
"""

import math

from glue import report


class Progress:
    """The report of one run: call after_step() and after_epoch() during training, and tell_result() at the end."""

    def __init__(self, result, corpus, log_interval):
        """`result`: a report.Report; `log_interval`: training steps per point of the loss curve."""
        self.result = result
        self.corpus = corpus
        self.log_interval = log_interval
        self.losses = []  # (summed loss in nats, tokens) of each training step of this epoch
        self.bar = None

    def start(self, trainer, epochs, steps_per_epoch):
        """Print what the text is, and after which epoch training continues; start the progress bar."""
        self.result.say(str(self.corpus))
        if trainer.epoch:
            self.result.say(f"Going on after epoch {trainer.epoch}, held-out perplexity {trainer.heldout:.3f}.")
        if trainer.epoch >= epochs:
            self.result.say(report.NOTHING_LEFT)
        self.bar = self.result.progress(total=epochs * steps_per_epoch)
        self.bar.update(trainer.step)

    def after_step(self, step, summed_loss, tokens):
        """Record the loss of one training step."""
        self.losses.append((summed_loss, tokens))
        self.bar.update()
        if step % self.log_interval == 0:
            self.result.scalar("loss/train", mean_loss(self.losses[-self.log_interval :]), step)

    def after_epoch(self, epoch, lr, heldout_perplexity):
        """Print and record the mean perplexity of the epoch's training steps, and the held-out perplexity."""
        train_perplexity = math.exp(mean_loss(self.losses))
        self.losses = []
        line = f"epoch {epoch:3d} | lr {lr:g} | train perplexity {train_perplexity:.3f}"
        line += f" | held-out perplexity {heldout_perplexity:.3f}"
        if self.corpus.floor:
            line += f" (floor {self.corpus.floor:.3f})"
        self.result.say(line)
        self.result.scalar("perplexity/train", train_perplexity, epoch)
        self.result.scalar("perplexity/heldout", heldout_perplexity, epoch)

    def tell_result(self, trainer, meter, tokens_per_step):
        """Write the summary and the picture, if the command line asks for them."""
        self.bar.close()
        tokens_per_second = None
        if meter.seconds:
            tokens_per_second = round(meter.timed_steps * tokens_per_step / meter.seconds, 1)
        self.result.close(
            plot={
                "perplexity (words)": {"perplexity/train": "training text", "perplexity/heldout": "held-out text"},
            },
            xlabel="epoch",
            floor=("floor", self.corpus.floor) if self.corpus.floor else None,
            heldout_perplexity=trainer.heldout,
            epochs=trainer.epoch,
            steps=trainer.step,
            tokens_per_second=tokens_per_second,
            **self.corpus.figures(),
        )


def mean_loss(losses):
    """Return the mean loss in nats per token.  `losses`: a pair (summed loss, tokens) for each training step."""
    return sum(loss for loss, _ in losses) / sum(tokens for _, tokens in losses)
