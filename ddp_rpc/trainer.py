"""What a trainer does (runs in every trainer process, on an RPC thread: the master sends _run_trainer there).

Shapes: B bags in a batch, I ids in a batch, C classes.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from clicks import ClickLog
from glue.measure import Meter
from glue.placement import to_wire
from glue.report import check_finite
from glue.seeds import seed_for
from model import HybridModel
from modes import MODES

HELDOUT_BATCHES, HELDOUT_BAGS = 16, 512  # 8,192 bags: an accuracy of 80 % is then good to about half a point


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a job is to do: the flags on which all ranks must agree (compared when they meet, see main.py)."""

    mode: str
    seed: int
    transport: str
    num_trainers: int
    num_servers: int
    num_embeddings: int
    embedding_dim: int
    sparse: bool
    targets: str
    batch_bags: int
    batches: int
    epochs: int
    lr: float

    @classmethod
    def names(cls):
        """Return the names of all these flags."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def of(cls, args):
        """Return the plan on a command line."""
        return cls(**{name: value for name, value in vars(args).items() if name in cls.names()})


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

    # Each trainer draws a part of the log that no other has, and judges a part of the held-out bags.
    log = ClickLog(plan.num_embeddings, plan.embedding_dim, seed_for(plan.seed, "teacher"), plan.targets)
    heldout = log.batches(HELDOUT_BATCHES, HELDOUT_BAGS, seed_for(plan.seed, "held-out"))
    heldout = heldout[rank :: plan.num_trainers]
    meter, step = Meter(plan.transport), epochs_done * plan.batches

    figures = evaluate(model, log, heldout, step)  # before the first step: what chance looks like
    tell_master(master_rref, epochs_done, figures, meter.seconds, model)
    for epoch in range(epochs_done + 1, plan.epochs + 1):
        batches = log.batches(plan.batches, plan.batch_bags, seed_for(plan.seed, "clicks", rank, epoch))
        dist.barrier()  # the clock measures training: no making of data, no waiting for a checkpoint
        losses = training.train(batches, learning_rate_scale(epoch, plan.epochs))
        for _, loss in zip(meter.over(batches), losses, strict=True):  # batch by batch: the meter, then the step
            step += 1
            check_finite(loss, "loss", step)
        figures = evaluate(model, log, heldout, step)
        tell_master(master_rref, epoch, figures, meter.seconds, model)
    return {"seconds": meter.seconds, "replicas_max_difference": check_replicas(model), **figures, **meter.figures()}


def learning_rate_scale(epoch, epochs):
    """Return the factor of the learning rate: 1 for the first half of the run, then down to 0 in a straight line.

    SGD with a constant rate ends up trembling around the optimum, here about a point of accuracy below it.
    """
    return min(1.0, 2 * (epochs - epoch + 0.5) / epochs)


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


def tell_master(master_rref, epoch, figures, seconds, model):
    """Let the master print and save what the first trainer tells it, while the others wait."""
    if dist.get_rank() == 0:
        fc_state = {name: tensor.cpu() for name, tensor in model.fc.module.state_dict().items()}
        # timeout=0: a large table takes long to save
        master_rref.rpc_sync(timeout=0).epoch_done(epoch, figures, seconds, fc_state)
    dist.barrier()  # nobody steps while the checkpoint is written: it is one moment of the whole model


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
