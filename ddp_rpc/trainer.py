"""What a trainer does (runs in every trainer process, on an RPC thread: the master sends run_trainer there).

Shapes: B bags in a batch, I ids in a batch, C classes.
"""

import time

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from clicks import ClickLog
from glue import measure, seeds
from model import HybridModel
from modes import MODES

HELDOUT_BATCHES, HELDOUT_BAGS = 16, 512  # 8,192 bags: an accuracy of 80 % is then good to about half a point


def run_trainer(emb_rrefs, master_rref, trainer, args, device, fc_state, epochs_done):
    """Train until args.epochs are done, together with the other trainers; return this trainer's measurements (a dict).

    emb_rrefs are the servers' EmbeddingShards, master_rref the HybridMaster that hears how it goes; device is a string;
    fc_state is the state_dict of `fc` to go on from, or None.  Called once in each trainer.  Follows the tutorial's
    _run_trainer.  Raises RuntimeError if the trainers' replicas of `fc` differ at the end.
    """
    torch.manual_seed(seeds.seed_for(args.seed, "fc"))
    model = HybridModel(emb_rrefs, args.embedding_dim, torch.device(device))
    if fc_state is not None:
        model.fc.module.load_state_dict(fc_state)
    training = MODES[args.mode](model, trainer, args)

    # Each trainer draws a part of the log that no other has, and judges a part of the held-out bags.
    log = ClickLog(args.num_embeddings, args.embedding_dim, seeds.seed_for(args.seed, "teacher"), args.targets)
    heldout = log.batches(HELDOUT_BATCHES, HELDOUT_BAGS, seeds.seed_for(args.seed, "held-out"))
    heldout = heldout[trainer :: args.num_trainers]

    seconds, wire_bytes = 0.0, 0
    figures = evaluate(model, log, heldout)  # before the first step: what chance looks like
    tell_master(master_rref, trainer, epochs_done, figures, seconds, model)
    for epoch in range(epochs_done + 1, args.epochs + 1):
        batches = log.batches(args.batches, args.batch_bags, seeds.seed_for(args.seed, "clicks", trainer, epoch))
        dist.barrier()  # the clock measures training: no making of data, no waiting for a checkpoint
        bytes_before = measure.wire_bytes() if epoch == args.epochs else 0
        started = time.perf_counter()
        training.train_epoch(batches, learning_rate_scale(epoch, args.epochs))
        dist.barrier()
        seconds += time.perf_counter() - started
        if epoch == args.epochs:  # one epoch tells as much as all
            wire_bytes = measure.wire_bytes() - bytes_before
        figures = evaluate(model, log, heldout)
        tell_master(master_rref, trainer, epoch, figures, seconds, model)
    return {"seconds": seconds, "wire_bytes": wire_bytes, "replicas_max_difference": check_replicas(model), **figures}


def learning_rate_scale(epoch, epochs):
    """Return the factor of the learning rate: 1 for the first half of the run, then down to 0 in a straight line.

    SGD with a constant rate ends up trembling around the optimum, here about a point of accuracy below it.
    """
    return min(1.0, 2 * (epochs - epoch + 0.5) / epochs)


@torch.no_grad()
def evaluate(model, log, heldout):
    """Return loss and accuracy on the held-out bags, and the teacher's accuracy there; the same on every trainer.

    Every trainer calls it at once, when all have stepped for the last time, with its own part of the bags.
    """
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64)  # loss, correct, the teacher's correct, bags
    for ids_I, offsets_B, target_B in heldout:
        logits_BC = model(ids_I, offsets_B).cpu()
        teacher_BC = log.teacher_logits(ids_I, offsets_B)
        totals[0] += F.cross_entropy(logits_BC, target_B, reduction="sum")
        totals[1] += (logits_BC.argmax(dim=1) == target_B).sum()
        totals[2] += (teacher_BC.argmax(dim=1) == target_B).sum()
        totals[3] += len(target_B)
    totals = totals.to(model.device)
    dist.all_reduce(totals)  # sums over all trainers, so a part may be smaller than another, or empty
    loss, correct, teacher_correct, bags = totals.tolist()
    model.train()
    return {
        "heldout_loss": loss / bags,
        "heldout_accuracy": correct / bags,
        "ceiling_accuracy": teacher_correct / bags,
    }


def tell_master(master_rref, trainer, epoch, figures, seconds, model):
    """Let the master print and save what the first trainer tells it, while the others wait."""
    if trainer == 0:
        fc_state = {name: tensor.cpu() for name, tensor in model.fc.module.state_dict().items()}
        # timeout=0: a large table takes long to save
        master_rref.rpc_sync(timeout=0).epoch_done(epoch, figures, seconds, fc_state)
    dist.barrier()  # nobody steps while the checkpoint is written: it is one moment of the whole model


def check_replicas(model):
    """Return the largest difference between the trainers' replicas of `fc`, which must be none at all."""
    lowest = parameters_to_vector(model.fc.parameters()).detach()
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    difference = float((highest - lowest).max())
    if difference != 0:  # NaN is different from 0, too
        raise RuntimeError(f"the trainers' replicas of fc differ by up to {difference:g}")
    return difference
