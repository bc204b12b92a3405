"""What a trainer does (runs in every trainer process, on an RPC thread: the master sends _run_trainer there)."""

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from clicks import ClickLog
from evaluation import check_replicas, draw_heldout, evaluate
from glue.meter import Meter
from glue.report import check_finite
from glue.tensors import seed_for
from model import HybridModel
from modes import MODES


def _run_trainer(emb_rrefs, rank, device, plan, master_rref, epochs_done=0, fc_state=None):
    """Train until plan.epochs are done, together with the other trainers; return this trainer's measurements (a dict).

    emb_rrefs are the servers' EmbeddingShards, master_rref the HybridMaster that hears how it goes; device is a string;
    fc_state is the state_dict of `fc` to go on from, after so many epochs.  Called once in each trainer.  Follows the
    tutorial's _run_trainer.  Raises PermanentError when training diverges, and RuntimeError if the trainers'
    replicas of `fc` differ at the end.
    """
    torch.manual_seed(seed_for(plan.seed, "fc"))
    model = HybridModel(emb_rrefs, plan.embedding_dim, torch.device(device))
    if fc_state is not None:
        model.fc.module.load_state_dict(fc_state)
    training = MODES[plan.mode](model, plan.lr)
    log = ClickLog(plan.num_embeddings, plan.embedding_dim, seed_for(plan.seed, "teacher"), plan.targets)
    heldout = draw_heldout(log, plan, rank)
    meter = Meter(plan.transport)
    steps_done = epochs_done * plan.batches

    figures = evaluate(model, log, heldout, steps_done)  # before the first step: what chance looks like
    tell_master(master_rref, epochs_done, figures, meter.seconds, model)
    for epoch in range(epochs_done + 1, plan.epochs + 1):
        training.set_learning_rate(learning_rate(plan, epoch))
        # Each trainer draws a part of the log that no other has.
        batches = log.batches(plan.batches, plan.batch_bags, seed_for(plan.seed, "clicks", rank, epoch))
        dist.barrier()  # the rate is set everywhere; and the clock measures no making of data, no wait for a checkpoint
        for batch, next_batch in itertools.pairwise([*batches, None]):
            with meter.step():
                loss = training.step(batch, next_batch)
                steps_done += 1
                check_finite(loss, "loss", steps_done)
        figures = evaluate(model, log, heldout, steps_done)
        tell_master(master_rref, epoch, figures, meter.seconds, model)
    difference = check_replicas(model)
    return {"seconds": meter.seconds, "replicas_max_difference": difference, **figures, **meter.figures()}


# ---------------------------------------------------------------------------------- around the steps, and before them


def learning_rate(plan, epoch):
    """Return the learning rate of an epoch: plan.lr for the first half of the run, then in a straight line towards 0.

    SGD with a constant rate ends up trembling around the optimum, here about a point of accuracy below it.
    """
    return plan.lr * min(1.0, 2 * (plan.epochs - epoch + 0.5) / plan.epochs)


def tell_master(master_rref, epoch, figures, seconds, model):
    """Let the master print and save what the first trainer tells it, while the others wait."""
    if dist.get_rank() == 0:
        fc_state = {name: tensor.cpu() for name, tensor in model.fc.module.state_dict().items()}
        # timeout=0: a large table takes long to save
        master_rref.rpc_sync(timeout=0).epoch_done(epoch, figures, seconds, fc_state)
    dist.barrier()  # nobody steps while the checkpoint is written: it is one moment of the whole model


@dataclass(frozen=True)
class Plan:
    """What the trainers are to do: flags of main.py that have the same values in all ranks."""

    mode: str
    seed: int
    transport: str
    num_trainers: int
    num_embeddings: int
    embedding_dim: int
    targets: str
    batch_bags: int
    batches: int
    epochs: int
    lr: float


def make_plan(args):
    """Return what the trainers need to know of the command line."""
    return Plan(
        mode=args.mode,
        seed=args.seed,
        transport=args.transport,
        num_trainers=args.num_trainers,
        num_embeddings=args.num_embeddings,
        embedding_dim=args.embedding_dim,
        targets=args.targets,
        batch_bags=args.batch_bags,
        batches=args.batches,
        epochs=args.epochs,
        lr=args.lr,
    )
