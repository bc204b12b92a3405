"""What a run prints and writes: lines, a progress bar, curves, checkpoints, and the result. In the master."""

from glue import checkpoint, report
from shards import gather_table, scatter_table


class Progress:  # in the master
    """The output of one run. Call start(), and finish() at the end.

    trainer1 calls after_step and after_epoch over RPC, so they run on RPC threads. They need no lock, because it makes
    one call at a time, and the main thread waits for the trainers meanwhile.
    """

    def __init__(self, args, emb_rrefs, resume_keys):
        """`resume_keys`: flags that must be equal in a run that continues from a checkpoint of this one."""
        self.args = args
        self.emb_rrefs = emb_rrefs
        self.report = report.Report("ddp_rpc", args)
        self.settings = {key: vars(args)[key] for key in resume_keys}
        self.epochs_before = 0  # epochs that were trained before this run
        self.fc_state = None  # the state_dict of fc in the checkpoint

    def start(self):
        """With --resume, load the checkpoint. The run that wrote it may have had another number of servers."""
        if state := checkpoint.resume(self.args, "ddp_rpc", self.settings):
            with checkpoint.going_on_from(self.args.checkpoint):
                self.epochs_before = state["epoch"]
                self.fc_state = state["fc"]
                scatter_table(state["table"], self.emb_rrefs)
            self.report.say(f"Going on after epoch {self.epochs_before}.")
            if self.epochs_before >= self.args.epochs:
                self.report.say(report.NOTHING_LEFT)
        self.bar = self.report.progress(total=self.args.epochs * self.args.batches)

    def after_step(self, step, loss):
        """Record the mean training loss of trainer1 in the last --log_interval steps."""
        self.report.scalar("loss/train", loss, step)
        self.bar.update(step - self.bar.n)

    def after_epoch(self, epoch, figures, seconds, fc_state):
        """Print the results of an epoch, and write the checkpoint. All trainers wait until this returns.

        `figures`: from evaluate(). `seconds`: the time of all training steps of this run so far.
        """
        args = self.args
        for name, value in figures.items():
            self.report.scalar(name.replace("_", "/"), value, epoch)
        line = f"epoch {epoch:3d}/{args.epochs}  held-out loss {figures['heldout_loss']:.4f}  "
        line += f"accuracy {figures['heldout_accuracy']:.4f} (ceiling {figures['ceiling_accuracy']:.4f})"
        if epoch > self.epochs_before:
            line += f"  {self.batches_per_second(epoch, seconds):.0f} batches/s"
        self.report.say(line)
        if args.checkpoint and epoch > self.epochs_before:
            # The master needs memory for the whole table while it does this.
            state = {"epoch": epoch, "table": gather_table(self.emb_rrefs), "fc": fc_state}
            checkpoint.save(args.checkpoint, "ddp_rpc", self.settings, state)

    def batches_per_second(self, epoch, seconds):
        """Return the rate of all trainers together, since the beginning of this run."""
        batches = (epoch - self.epochs_before) * self.args.batches * self.args.num_trainers
        return batches / seconds if seconds else 0.0

    def finish(self, results):
        """Print the result, write the summary. `results`: what each trainer has returned, trainer1 first."""
        args = self.args
        self.bar.close()
        figures = results[0]  # but for the seconds, they are the same in all trainers
        rate = self.batches_per_second(args.epochs, max(result["seconds"] for result in results))
        samples = rate * args.batch_bags
        self.report.say(
            f"{args.mode}: held-out accuracy {figures['heldout_accuracy']:.4f}, "
            f"the teacher's own {figures['ceiling_accuracy']:.4f}; {rate:.0f} batches/s, {samples:.0f} samples/s; "
            f"replicas of fc identical on {args.num_trainers} trainer{'s' * (args.num_trainers > 1)}"
        )
        self.report.close(
            plot={"accuracy on held-out bags (fraction)": {"heldout/accuracy": "the model"}},
            xlabel="epoch",
            floor=("the teacher's own", figures["ceiling_accuracy"]),
            heldout_loss=figures["heldout_loss"],
            heldout_accuracy=figures["heldout_accuracy"],
            ceiling_accuracy=figures["ceiling_accuracy"],
            batches_per_second=rate,
            samples_per_second=samples,
            num_trainers=args.num_trainers,
            num_servers=args.num_servers,
        )
