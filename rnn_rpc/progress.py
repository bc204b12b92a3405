"""What a run prints and writes: lines, a progress bar, curves, checkpoints, and the result. In the trainer."""

import math

from glue import checkpoint, report


class Progress:
    """The output of one run."""

    def __init__(self, args, corpus, trainer, resume_keys):
        """`resume_keys`: flags that must be equal in a run that continues from a checkpoint of this one."""
        self.args = args
        self.corpus = corpus
        self.trainer = trainer
        self.report = report.Report("rnn_rpc", args)
        self.settings = {key: vars(args)[key] for key in resume_keys} | {"text": corpus.fingerprint()}
        self.losses = []  # (summed loss in nats, tokens) of each training step of this epoch

    def start(self, total_steps):
        """Print what the text is. With --resume, load the checkpoint."""
        self.report.say(str(self.corpus))
        if state := checkpoint.resume(self.args, "rnn_rpc", self.settings):
            self.trainer.load_state_dict(state)
            line = f"Going on after epoch {self.trainer.epoch}, held-out perplexity {self.trainer.heldout:.3f}."
            self.report.say(line)
            if self.trainer.epoch >= self.args.epochs:
                self.report.say(report.NOTHING_LEFT)
        self.bar = self.report.progress(total=total_steps)
        self.bar.update(self.trainer.step)

    def after_step(self, summed_loss, tokens):
        self.losses.append((summed_loss, tokens))
        self.bar.update()
        interval = self.args.log_interval
        if self.trainer.step % interval == 0:
            self.report.scalar("loss/train", mean_loss(self.losses[-interval:]), self.trainer.step)

    def after_epoch(self):
        """Print and record the mean perplexity of the epoch's steps, and the held-out one; write the checkpoint."""
        train_perplexity = math.exp(mean_loss(self.losses))
        self.losses = []
        line = f"epoch {self.trainer.epoch:3d} | train perplexity {train_perplexity:.3f}"
        line += f" | held-out perplexity {self.trainer.heldout:.3f}"
        if self.corpus.floor:
            line += f" (floor {self.corpus.floor:.3f})"
        self.report.say(line)
        self.report.scalar("perplexity/train", train_perplexity, self.trainer.epoch)
        self.report.scalar("perplexity/heldout", self.trainer.heldout, self.trainer.epoch)
        if self.args.checkpoint:
            checkpoint.save(self.args.checkpoint, "rnn_rpc", self.settings, self.trainer.state_dict())

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
