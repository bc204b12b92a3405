"""The training loop of a trainer.

Runs in every trainer process, on an RPC thread, because the master calls _run_trainer over RPC.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from clicks import ClickLog
from evaluation import check_replicas, draw_heldout, evaluate
from glue.report import Meter, check_finite
from glue.seeds import seed_for
from model import HybridModel
from modes import MODES


def _run_trainer(emb_rrefs, rank, device, plan, master_rref, epochs_done=0, fc_state=None):
    """Train until plan.epochs are done, together with the other trainers; return this trainer's measurements (a dict).

    The master calls it once in each trainer.  It follows the tutorial's _run_trainer.
    `emb_rrefs`: RRefs to the servers' EmbeddingShards.  `device`: a string.  `master_rref`: an RRef to the
    HybridMaster, which gets the results of each epoch.  When a run is resumed, `epochs_done` is the number of epochs
    that were trained before the checkpoint, and `fc_state` is the checkpoint's state_dict of `fc`.
    Raises UserError if training diverges, and RuntimeError if the trainers' replicas of `fc` differ at the end.
    """
    torch.manual_seed(seed_for(plan.seed, "fc"))
    model = HybridModel(emb_rrefs, plan.embedding_dim, torch.device(device))
    if fc_state is not None:
        model.fc.module.load_state_dict(fc_state)
    training = MODES[plan.mode](model, plan.lr)
    log = ClickLog(plan.num_embeddings, plan.embedding_dim, seed_for(plan.seed, "teacher"), plan.targets)
    heldout = draw_heldout(log, plan, rank)
    meter = Meter()
    steps_done = epochs_done * plan.batches

    figures = evaluate(model, log, heldout, steps_done)  # before the first training step: the accuracy of guessing
    tell_master(master_rref, epochs_done, figures, meter.seconds, model)
    for epoch in range(epochs_done + 1, plan.epochs + 1):
        training.set_learning_rate(learning_rate(plan, epoch))
        # The seed depends on the rank, so each trainer draws different batches.
        batches = log.batches(plan.batches, plan.batch_bags, seed_for(plan.seed, "clicks", rank, epoch))
        # After the barrier, the learning rate is set in all processes, and all trainers have drawn their batches.  So
        # no training step waits for a trainer that still draws, and the measured time does not include drawing.
        dist.barrier()
        for batch, next_batch in itertools.pairwise([*batches, None]):
            with meter.step():
                loss = training.step(batch, next_batch)
                steps_done += 1
                check_finite(loss, "loss", steps_done)
        figures = evaluate(model, log, heldout, steps_done)
        tell_master(master_rref, epoch, figures, meter.seconds, model)
    difference = check_replicas(model)
    return {"seconds": meter.seconds, "replicas_max_difference": difference, **figures}


# --------------------------------------------------------------------- before the training steps, and between epochs


def learning_rate(plan, epoch):
    """Return the learning rate of an epoch: plan.lr in the first half of the run; then it falls linearly towards 0.

    With a constant rate, SGD does not come to rest at the optimum.  In this scenario its accuracy then ends about one
    percentage point lower.
    """
    return plan.lr * min(1.0, 2 * (plan.epochs - epoch + 0.5) / plan.epochs)


def tell_master(master_rref, epoch, figures, seconds, model):
    """Trainer 0 sends the results of an epoch to the master, which prints and saves them.  The other trainers wait."""
    if dist.get_rank() == 0:
        fc_state = {name: tensor.cpu() for name, tensor in model.fc.module.state_dict().items()}
        # timeout=0: no limit, because a large table takes long to save
        master_rref.rpc_sync(timeout=0).epoch_done(epoch, figures, seconds, fc_state)
    # No trainer changes the table or `fc` while the master writes the checkpoint, so all parts of the checkpoint are
    # of the same moment.
    dist.barrier()


@dataclass(frozen=True)
class Plan:
    """The flags of main.py that the trainers need.  Each of them has the same value in all ranks."""

    mode: str
    seed: int
    num_trainers: int
    num_embeddings: int
    embedding_dim: int
    targets: str
    batch_bags: int
    batches: int
    epochs: int
    lr: float


def make_plan(args):
    """Return a Plan with the values of the flags."""
    return Plan(
        mode=args.mode,
        seed=args.seed,
        num_trainers=args.num_trainers,
        num_embeddings=args.num_embeddings,
        embedding_dim=args.embedding_dim,
        targets=args.targets,
        batch_bags=args.batch_bags,
        batches=args.batches,
        epochs=args.epochs,
        lr=args.lr,
    )
