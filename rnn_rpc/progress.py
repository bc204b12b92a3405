"""What a run prints and writes: lines, a progress bar, curves, checkpoints, and the result. In the trainer."""

import math

from glue import checkpoint, report


class Progress:  # in the trainer
    """The output of one run. Call start(), after_step() and after_epoch(), and finish() at the end."""

    def __init__(self, args, corpus, trainer, steps_per_epoch, resume_keys):
        """`resume_keys`: flags that must be equal in a run that continues from a checkpoint of this one."""
        self.args = args
        self.corpus = corpus
        self.trainer = trainer
        self.report = report.Report("rnn_rpc", args)
        self.settings = {key: vars(args)[key] for key in resume_keys} | {"text": corpus.fingerprint()}
        self.total_steps = args.epochs * steps_per_epoch
        self.losses = []  # (summed loss in nats, tokens) of each training step of this epoch
        self.tokens = 0  # of all training steps of this run

    def start(self):
        """Print what the text is. With --resume, load the checkpoint."""
        corpus = self.corpus
        sizes = f"{len(corpus.train):,} tokens of {corpus.name} to train on, {len(corpus.heldout):,} held out"
        self.report.say(f"{sizes}, V = {len(corpus.vocabulary):,}.")
        if corpus.floor:
            self.report.say(
                f"No model can get below a perplexity of {corpus.floor:.3f}. "
                f"A model that uses only the last word cannot get below {corpus.bigram_floor:.3f}."
            )
        if state := checkpoint.resume(self.args, "rnn_rpc", self.settings):
            with checkpoint.going_on_from(self.args.checkpoint):
                self.trainer.load_state_dict(state)
            perplexity = f"{self.trainer.heldout:.3f}"
            self.report.say(f"Going on after epoch {self.trainer.epoch}, with a held-out perplexity of {perplexity}.")
            if self.trainer.epoch >= self.args.epochs:
                self.report.say(report.NOTHING_LEFT)
        self.bar = self.report.progress(total=self.total_steps)
        self.bar.update(self.trainer.step)

    def after_step(self, summed_loss, tokens):
        self.losses.append((summed_loss, tokens))
        self.tokens += tokens
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

    def finish(self, meter):
        """Write the summary and the picture, if the command line asks for them."""
        corpus = self.corpus
        self.bar.close()
        tokens_per_second = None
        if meter.seconds:
            timed_tokens = self.tokens * meter.timed_steps / meter.steps
            tokens_per_second = round(timed_tokens / meter.seconds, 1)
        self.report.close(
            plot={
                "perplexity (words)": {"perplexity/train": "training text", "perplexity/heldout": "held-out text"},
            },
            xlabel="epoch",
            floor=("floor", corpus.floor) if corpus.floor else None,
            heldout_perplexity=self.trainer.heldout,
            epochs=self.trainer.epoch,
            steps=self.trainer.step,
            tokens_per_second=tokens_per_second,
            vocabulary=len(corpus.vocabulary),
            floor_perplexity=corpus.floor,
            bigram_floor_perplexity=corpus.bigram_floor,
        )


def mean_loss(losses):
    """Return the mean loss in nats per token. `losses`: a pair (summed loss, tokens) for each training step."""
    return sum(loss for loss, _ in losses) / sum(tokens for _, tokens in losses)
