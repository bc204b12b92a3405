"""Measure loss and accuracy on held-out bags, and check that all trainers have the same replica of `fc`.

Runs in every trainer process. All trainers call these functions at the same time.

Shapes: B bags in a batch, C classes.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

from glue.report import check_finite
from glue.seeds import seed_for

HELDOUT_BATCHES, HELDOUT_BAGS = 16, 512  # 8,192 bags: the standard error of an accuracy of 0.7 is about 0.005


def draw_heldout(log, seed):
    """Return this trainer's part of the held-out batches. They are divided among the trainers."""
    batches = log.batches(HELDOUT_BATCHES, HELDOUT_BAGS, seed_for(seed, "held-out"))
    return batches[dist.get_rank() :: dist.get_world_size()]


@torch.no_grad()
def evaluate(model, log, heldout, step):
    """Return the model's loss and accuracy on all held-out bags, and the teacher's accuracy on them (a dict).

    All trainers call it at the same time, each with its own part of the bags. All get the same result. `step` is the
    number of training steps so far. Raises UserError if training has diverged.
    """
    check_replicas(model)  # and no trainer goes on before all have finished their training steps
    totals = torch.zeros(4, dtype=torch.float64)  # loss, correct, the teacher's correct, bags
    for ids_I, offsets_B, target_B in heldout:
        logits_BC = model(ids_I, offsets_B).cpu()
        teacher_BC = log.teacher_logits(ids_I, offsets_B)
        totals[0] += F.cross_entropy(logits_BC, target_B, reduction="sum")
        totals[1] += (logits_BC.argmax(dim=1) == target_B).sum()
        totals[2] += (teacher_BC.argmax(dim=1) == target_B).sum()
        totals[3] += len(target_B)
    dist.all_reduce(totals)  # the sums over all trainers; the parts may differ in size, and some may be empty
    loss, correct, teacher_correct, bags = totals.tolist()
    return {
        "heldout_loss": check_finite(loss / bags, "held-out loss", step),
        "heldout_accuracy": correct / bags,
        "ceiling_accuracy": teacher_correct / bags,
    }


def check_replicas(model):
    """Raise RuntimeError if the trainers' replicas of `fc` differ."""
    lowest = parameters_to_vector(model.fc.parameters()).detach().cpu()
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        difference = float((highest - lowest).max())
        raise RuntimeError(f"the trainers' replicas of fc differ by up to {difference:g}")
