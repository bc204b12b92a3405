"""The master's part after it has started the trainers: print results, write checkpoints, resume from a checkpoint.

Runs in the master process.  Trainer 0 calls epoch_done() over RPC, so it runs on RPC threads, with save().  The main
thread calls the other methods.
"""

from collections import Counter

import torch

from glue import checkpoint, report

SCENARIO = "ddp_rpc"
SETTINGS = ("seed", "targets", "num_embeddings", "embedding_dim")  # flags that a resumed run must not change
ROWS_AT_A_TIME = 262144  # rows of the table in one message, when a run is resumed


class HybridMaster:
    """The results of the run, and its checkpoints.  The trainers have an RRef to it."""

    def __init__(self, args, emb_rrefs):
        """`args`: the flags.  `emb_rrefs`: RRefs to the servers' EmbeddingShards."""
        self.args = args
        self.emb_rrefs = emb_rrefs
        self.report = report.Report(SCENARIO, args)
        self.bar = self.report.progress(total=args.epochs * args.batches, unit="step")
        self.settings = {name: vars(args)[name] for name in SETTINGS}
        self.epochs_done = 0
        self.fc_state = None  # the state_dict of fc in the checkpoint, with --resume

    def resume(self):
        """With --resume, read the checkpoint and send its rows to the servers.

        The run that wrote the checkpoint may have had another number of servers.
        """
        args = self.args
        saved = checkpoint.resume(args, SCENARIO, self.settings)
        if saved is None:
            return
        self.fc_state = saved["fc"]
        self.epochs_done = saved["epoch"]
        for first in range(0, args.num_embeddings, ROWS_AT_A_TIME):
            rows = saved["table"][first : first + ROWS_AT_A_TIME]
            torch.futures.wait_all([rref.rpc_async(timeout=0).put_rows(first, rows) for rref in self.emb_rrefs])
        self.report.say(f"Going on after epoch {self.epochs_done} of {args.checkpoint}.")
        if self.epochs_done >= args.epochs:
            self.report.say(report.NOTHING_LEFT)

    def epoch_done(self, epoch, figures, seconds, fc_state):
        """Print the results of an epoch in one line, and write a checkpoint if --checkpoint is given.

        `figures`: {name: value}, from evaluate().  `seconds`: the time of all training steps of this run so far.
        `fc_state`: the state_dict of `fc`.
        Needs no lock: only trainer 0 calls it, once for each epoch, and all trainers wait until it returns.
        """
        args = self.args
        for name, value in figures.items():
            self.report.scalar(name.replace("_", "/"), value, epoch)
        text = (
            f"epoch {epoch:3d}/{args.epochs}  held-out loss {figures['heldout_loss']:.4f}  "
            f"accuracy {figures['heldout_accuracy']:.4f} (ceiling {figures['ceiling_accuracy']:.4f})"
        )
        if epoch > self.epochs_done:
            rate = (epoch - self.epochs_done) * args.batches * args.num_trainers / seconds
            text += f"  {rate:.0f} batches/s"
        self.report.say(text)
        self.bar.n = epoch * args.batches
        self.bar.refresh()
        if args.checkpoint and epoch > self.epochs_done:
            self.save(epoch, fc_state)

    def save(self, epoch, fc_state):
        """Write the whole model to one file.  The master needs memory for the whole table while it does this."""
        args = self.args
        table = torch.empty(args.num_embeddings, args.embedding_dim)
        for shard, rref in enumerate(self.emb_rrefs):
            table[shard :: args.num_servers] = rref.rpc_sync(timeout=0).get_rows()
        state = {"epoch": epoch, "table": table, "fc": fc_state}
        checkpoint.save(args.checkpoint, SCENARIO, self.settings, state)

    def close(self, results):
        """Print the result of the run; write the summary and the picture if their flags are given.

        `results`: the dict that each trainer's _run_trainer has returned.
        """
        args = self.args
        self.bar.close()
        one_trainer = results[0]  # the figures of the evaluation are the same for all trainers
        seconds = max(result["seconds"] for result in results)
        batches = max(args.epochs - self.epochs_done, 0) * args.batches * args.num_trainers
        rate = batches / seconds if batches else 0.0
        staleness = Counter()  # staleness -> number of gradients with it, on all servers together
        megabytes = []
        for emb_rref in self.emb_rrefs:
            staleness += emb_rref.rpc_sync().staleness()
            megabytes.append(emb_rref.rpc_sync().megabytes())
        figures = {
            "heldout_loss": one_trainer["heldout_loss"],
            "heldout_accuracy": one_trainer["heldout_accuracy"],
            "ceiling_accuracy": one_trainer["ceiling_accuracy"],
            "replicas_max_difference": one_trainer["replicas_max_difference"],
            "batches_per_second": rate,
            "samples_per_second": rate * args.batch_bags,
            **report.staleness_figures(staleness),
            "num_trainers": args.num_trainers,
            "num_servers": args.num_servers,
            "server_megabytes": megabytes,
        }
        self.report.say(
            f"{args.mode}: held-out accuracy {figures['heldout_accuracy']:.4f}, "
            f"the teacher's own {figures['ceiling_accuracy']:.4f}; "
            f"{rate:.0f} batches/s, {figures['samples_per_second']:.0f} samples/s; replicas of fc identical on "
            f"{args.num_trainers} trainer{'s' * (args.num_trainers > 1)}"
        )
        self.report.close(
            {"accuracy on held-out bags (fraction)": {"heldout/accuracy": "the model"}},
            "epoch",
            floor=("the teacher's own", figures["ceiling_accuracy"]),
            **figures,
        )
