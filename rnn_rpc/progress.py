"""Tells how training goes: lines, a progress bar, curves, and the summary at the end.

Runs in the trainer process, called from main.py's run_trainer.
"""

import math

from glue import report


class Progress:
    """What one run tells: after_step() and after_epoch() while it trains, tell_result() at the end."""

    def __init__(self, result, corpus, log_interval):
        """`result`: a report.Report; `log_interval`: steps per point of the curve of losses."""
        self.result = result
        self.corpus = corpus
        self.log_interval = log_interval
        self.losses = []  # of this epoch's steps: (summed loss in nats, tokens)
        self.bar = None

    def start(self, trainer, epochs, steps_per_epoch):
        """Say what there is to learn, and where training begins."""
        self.result.say(str(self.corpus))
        if trainer.epoch:
            self.result.say(f"Going on after epoch {trainer.epoch}, held-out perplexity {trainer.heldout:.3f}.")
        if trainer.epoch >= epochs:
            self.result.say(report.NOTHING_LEFT)
        self.bar = self.result.progress(total=epochs * steps_per_epoch)
        self.bar.update(trainer.step)

    def after_step(self, step, summed_loss, tokens):
        """Note one training step's loss."""
        self.losses.append((summed_loss, tokens))
        self.bar.update()
        if step % self.log_interval == 0:
            self.result.scalar("loss/train", mean_loss(self.losses[-self.log_interval :]), step)

    def after_epoch(self, epoch, lr, heldout_perplexity):
        """Tell the perplexity of the epoch's training steps, and beside it that of the held-out text."""
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
        """Write the summary and the picture, if they are asked for."""
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
            **meter.figures(),
        )


def mean_loss(losses):
    """Return the nats per token of some steps, each a pair of summed loss and tokens."""
    return sum(loss for loss, _ in losses) / sum(tokens for _, tokens in losses)
