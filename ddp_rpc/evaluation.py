"""How good the model is, and whether the trainers have the same (runs in every trainer process, in all at once).

Shapes: B bags in a batch, C classes.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from glue.report import check_finite
from glue.tensors import seed_for, to_wire

HELDOUT_BATCHES, HELDOUT_BAGS = 16, 512  # 8,192 bags: an accuracy of 80 % is then good to about half a point


def draw_heldout(log, plan, rank):
    """Return this trainer's part of the held-out batches: each trainer judges some of them."""
    batches = log.batches(HELDOUT_BATCHES, HELDOUT_BAGS, seed_for(plan.seed, "held-out"))
    return batches[rank :: plan.num_trainers]


@torch.no_grad()
def evaluate(model, log, heldout, step):
    """Return loss and accuracy on the held-out bags, and the teacher's accuracy there; the same on every trainer.

    Every trainer calls it at once, with its own part of the bags.  Raises PermanentError when training has diverged.
    """
    dist.barrier()  # all have stepped for the last time
    totals = torch.zeros(4, dtype=torch.float64)  # loss, correct, the teacher's correct, bags
    for ids_I, offsets_B, target_B in heldout:
        logits_BC = model(ids_I, offsets_B).cpu()
        teacher_BC = log.teacher_logits(ids_I, offsets_B)
        totals[0] += F.cross_entropy(logits_BC, target_B, reduction="sum")
        totals[1] += (logits_BC.argmax(dim=1) == target_B).sum()
        totals[2] += (teacher_BC.argmax(dim=1) == target_B).sum()
        totals[3] += len(target_B)
    dist.all_reduce(totals)  # sums over all trainers, so a part may be smaller than another, or empty
    loss, correct, teacher_correct, bags = totals.tolist()
    return {
        "heldout_loss": check_finite(loss / bags, "held-out loss", step),
        "heldout_accuracy": correct / bags,
        "ceiling_accuracy": teacher_correct / bags,
    }


def check_replicas(model):
    """Return the largest difference between the trainers' replicas of `fc`, which must be none at all."""
    lowest = to_wire(parameters_to_vector(model.fc.parameters()).detach())
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    difference = float((highest - lowest).max())
    if difference != 0:
        raise RuntimeError(f"the trainers' replicas of fc differ by up to {difference:g}")
    return difference
