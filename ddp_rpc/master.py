"""What the master does: make the table on the servers, send the trainers to work, print and save what they tell it.

Runs in the master process: run() on its main thread, epoch_done() on RPC threads, called by the first trainer.
"""

import queue
from collections import Counter

import torch
import torch.distributed.rpc as rpc

from embedding_server import EmbeddingShard
from glue import checkpoint, report
from glue.seeds import seed_for
from trainer import Plan, _run_trainer

SCENARIO = "ddp_rpc"
SETTINGS = ("seed", "targets", "num_embeddings", "embedding_dim")  # a run that goes on must have the same
ROWS_AT_A_TIME = 262144


class HybridMaster:
    """The master's side of the job.  The first trainer holds an RRef to it."""

    def __init__(self, args, worker_name, devices):
        """`worker_name(rank, args)` gives each rank's name, `devices[rank]` where its tensors live, as a string."""
        self.args, self.worker_name, self.devices = args, worker_name, devices
        self.report = report.Report(SCENARIO, args)
        self.bar = self.report.progress(total=args.epochs * args.batches, unit="step")
        self.settings = {name: vars(args)[name] for name in SETTINGS}
        saved = checkpoint.resume(args, SCENARIO, self.settings)
        self.emb_rrefs = [self.create_shard(shard) for shard in range(args.num_servers)]
        self.epochs_done, self.fc_state = 0, None
        if saved is not None:
            self.restore(saved)

    def create_shard(self, shard):
        """Create one server's part of the table there, and return an RRef to it (the tutorial's rpc.remote)."""
        args = self.args
        rank = args.num_trainers + 1 + shard
        return rpc.remote(
            self.worker_name(rank, args),
            EmbeddingShard,
            timeout=0,  # a large table takes long to fill
            args=(shard, args.num_servers, args.num_embeddings, args.embedding_dim),
            kwargs={
                "num_trainers": args.num_trainers,
                "lr": args.lr,
                "sparse": args.sparse,
                "seed": seed_for(args.seed, "table"),
                "device": self.devices[rank],
            },
        )

    def run(self):
        """Run the training function on every trainer, wait for all of them, and report the result."""
        args, ended = self.args, queue.SimpleQueue()
        plan, me = Plan.of(args), rpc.RRef(self)
        for rank in range(args.num_trainers):
            trainer_args = (self.emb_rrefs, rank, self.devices[rank], plan, me, self.epochs_done, self.fc_state)
            # timeout=0: this call lasts as long as the training; the default would cut it off after 60 seconds.
            future = rpc.rpc_async(self.worker_name(rank, args), _run_trainer, args=trainer_args, timeout=0)
            future.add_done_callback(ended.put)
        # In the order in which they end: when one fails the others wait for it in an allreduce, and we must hear of it.
        results = [ended.get().wait() for _ in range(args.num_trainers)]
        self.close(results)

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

    def restore(self, saved):
        """Hand a checkpoint's rows to the servers, however many servers wrote it."""
        args, table = self.args, saved["table"]
        for first in range(0, args.num_embeddings, ROWS_AT_A_TIME):
            rows = table[first : first + ROWS_AT_A_TIME]
            torch.futures.wait_all([rref.rpc_async(timeout=0).put_rows(first, rows) for rref in self.emb_rrefs])
        self.fc_state, self.epochs_done = saved["fc"], saved["epoch"]
        self.report.say(f"Going on after epoch {self.epochs_done} of {args.checkpoint}.")
        if self.epochs_done >= args.epochs:
            self.report.say(report.NOTHING_LEFT)

    def close(self, results):
        """Tell the result of the run: `results` are the trainers' measurements, of which some are the same for all."""
        args, of_all = self.args, results[0]
        self.bar.close()
        seconds = max(result["seconds"] for result in results)
        batches = max(args.epochs - self.epochs_done, 0) * args.batches * args.num_trainers
        rate = batches / seconds if batches else 0.0
        # The steps that a server's table took between a lookup and its backward.
        stale = sum((rref.rpc_sync().staleness() for rref in self.emb_rrefs), Counter())
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
            "staleness_mean": round(sum(steps * times for steps, times in stale.items()) / max(1, stale.total()), 3),
            "num_trainers": args.num_trainers,
            "num_servers": args.num_servers,
            "server_megabytes": [rref.rpc_sync().megabytes() for rref in self.emb_rrefs],
        }
        self.report.say(
            f"{args.mode}: held-out accuracy {figures['heldout_accuracy']:.4f}, "
            f"the teacher's own {figures['ceiling_accuracy']:.4f}; "
            f"{rate:.0f} batches/s, {figures['samples_per_second']:.0f} samples/s; replicas of fc identical on "
            f"{args.num_trainers} trainer{'s' * (args.num_trainers > 1)}"
        )
        curve, ceiling = {"heldout/accuracy": "the model"}, ("the teacher's own", figures["ceiling_accuracy"])
        counts = "staleness (steps since the lookup)", stale
        self.report.close(curve, "epoch", "accuracy on held-out bags (fraction)", ceiling, counts, **figures)
