"""Reports the progress and the result of training, in the trainer: lines, a progress bar, curves, and a summary."""

import math

from glue import report


class Progress:
    """The report of one run."""

    def __init__(self, args):
        self.args = args
        self.report = report.Report("rnn_rpc", args)
        self.losses = []  # (summed loss in nats, tokens) of each training step of this epoch

    def start(self, corpus, trainer, steps_per_epoch):
        """Print what the text is, and after which epoch training continues; start the progress bar."""
        self.corpus = corpus
        self.trainer = trainer
        self.report.say(str(corpus))
        if trainer.epoch:
            self.report.say(f"Going on after epoch {trainer.epoch}, held-out perplexity {trainer.heldout:.3f}.")
        if trainer.epoch >= self.args.epochs:
            self.report.say(report.NOTHING_LEFT)
        self.bar = self.report.progress(total=self.args.epochs * steps_per_epoch)
        self.bar.update(trainer.step)

    def after_step(self, summed_loss, tokens):
        self.losses.append((summed_loss, tokens))
        self.bar.update()
        interval = self.args.log_interval
        if self.trainer.step % interval == 0:
            self.report.scalar("loss/train", mean_loss(self.losses[-interval:]), self.trainer.step)

    def after_epoch(self):
        """Print and record the mean perplexity of the epoch's training steps, and the held-out perplexity."""
        train_perplexity = math.exp(mean_loss(self.losses))
        self.losses = []
        line = f"epoch {self.trainer.epoch:3d} | train perplexity {train_perplexity:.3f}"
        line += f" | held-out perplexity {self.trainer.heldout:.3f}"
        if self.corpus.floor:
            line += f" (floor {self.corpus.floor:.3f})"
        self.report.say(line)
        self.report.scalar("perplexity/train", train_perplexity, self.trainer.epoch)
        self.report.scalar("perplexity/heldout", self.trainer.heldout, self.trainer.epoch)

    def finish(self, meter, tokens_per_step):
        """Write the summary and the picture, if the command line asks for them."""
        self.bar.close()
        tokens_per_second = None
        if meter.seconds:
            tokens_per_second = round(meter.timed_steps * tokens_per_step / meter.seconds, 1)
        self.report.close(
            plot={
                "perplexity (words)": {"perplexity/train": "training text", "perplexity/heldout": "held-out text"},
            },
            xlabel="epoch",
            floor=("floor", self.corpus.floor) if self.corpus.floor else None,
            heldout_perplexity=self.trainer.heldout,
            epochs=self.trainer.epoch,
            steps=self.trainer.step,
            tokens_per_second=tokens_per_second,
            **self.corpus.figures(),
        )


def mean_loss(losses):
    """Return the mean loss in nats per token. `losses`: a pair (summed loss, tokens) for each training step."""
    return sum(loss for loss, _ in losses) / sum(tokens for _, tokens in losses)
