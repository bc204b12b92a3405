"""What the master does beside sending the trainers to work: print and save what they tell it, go on from a checkpoint.

Runs in the master process: epoch_done() on RPC threads, called by the first trainer, the rest on its main thread.
"""

from collections import Counter

import torch

from glue import checkpoint, report

SCENARIO = "ddp_rpc"
SETTINGS = ("seed", "targets", "num_embeddings", "embedding_dim")  # a run that goes on must have the same
ROWS_AT_A_TIME = 262144


class HybridMaster:
    """The master's view of the run.  The first trainer holds an RRef to it."""

    def __init__(self, args, emb_rrefs):
        """`emb_rrefs` are the servers' EmbeddingShards."""
        self.args = args
        self.emb_rrefs = emb_rrefs
        self.report = report.Report(SCENARIO, args)
        self.bar = self.report.progress(total=args.epochs * args.batches, unit="step")
        self.settings = {name: vars(args)[name] for name in SETTINGS}
        self.epochs_done = 0
        self.fc_state = None  # to go on from

    def resume(self):
        """With --resume: hand a checkpoint's rows to the servers, however many servers wrote it."""
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
        """Print one line, and save a checkpoint.  `seconds` is the training time so far, in this run.

        Needs no lock: only the first trainer calls it, one epoch after the other, and all trainers wait meanwhile.
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
        """Write the whole model to one file.  (So the master holds the whole table here, and only here.)"""
        args = self.args
        table = torch.empty(args.num_embeddings, args.embedding_dim)
        for shard, rref in enumerate(self.emb_rrefs):
            table[shard :: args.num_servers] = rref.rpc_sync(timeout=0).get_rows()
        state = {"epoch": epoch, "table": table, "fc": fc_state}
        checkpoint.save(args.checkpoint, SCENARIO, self.settings, state)

    def close(self, results):
        """Tell the result of the run: `results` are the trainers' measurements, of which some are the same for all."""
        args = self.args
        self.bar.close()
        of_all = results[0]
        seconds = max(result["seconds"] for result in results)
        batches = max(args.epochs - self.epochs_done, 0) * args.batches * args.num_trainers
        rate = batches / seconds if batches else 0.0
        staleness = Counter()  # how many steps a server's table took between a lookup and its gradient -> how often
        megabytes = []
        for emb_rref in self.emb_rrefs:
            staleness += emb_rref.rpc_sync().staleness()
            megabytes.append(emb_rref.rpc_sync().megabytes())
        figures = {
            "heldout_loss": of_all["heldout_loss"],
            "heldout_accuracy": of_all["heldout_accuracy"],
            "ceiling_accuracy": of_all["ceiling_accuracy"],
            "replicas_max_difference": of_all["replicas_max_difference"],
            "batches_per_second": rate,
            "samples_per_second": rate * args.batch_bags,
            "rpc_calls": of_all["rpc_calls"],  # by one trainer, and so are the two below
            "rpc_calls_per_step": of_all["rpc_calls_per_step"],
            "wire_bytes_per_step": of_all["wire_bytes_per_step"],
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
            counts=("staleness (steps since the lookup)", staleness),
            **figures,
        )
