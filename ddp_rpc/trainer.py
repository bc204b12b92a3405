"""What a trainer does in every mode: an epoch of training, and the evaluation after it.

It is not in main.py, because RPC sends a class as the name of its module and its own name. The module of main.py is
called `__main__` only in a rank that was started with main.py, and not in one that another program has started.

Shapes: B bags in a batch, C classes.
"""

import collections
import dataclasses
import time

from glue import checkpoint
from glue.training import check_finite, seed_for

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

from clicks import ClickLog

HELDOUT_BATCHES, HELDOUT_BAGS = 16, 512  # 8,192 bags: the standard error of an accuracy of 0.7 is about 0.005


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the master tells the trainers of the flags. An attribute has the name of its flag."""

    seed: int
    num_embeddings: int
    embedding_dim: int
    targets: str
    batch_bags: int
    batches: int
    epochs: int
    lr: float
    log_interval: int


class Trainer:  # in a trainer, on RPC threads; the master makes one call at a time, to all trainers together
    """The training of one trainer. Source: tutorial, _run_trainer.

    Each mode has a subclass, with three methods: make_model() returns the HybridModel, set_learning_rate(lr) is called
    before each epoch, and step(batch) trains on a batch and returns its loss. (`pipelined` replaces train instead.)
    """

    def __init__(self, plan, emb_rrefs, rank, device, fc_state):
        """`emb_rrefs`: RRefs to the shards; `fc_state`: of the checkpoint from which the run goes on, or None."""
        self.plan, self.emb_rrefs = plan, emb_rrefs
        self.rank, self.device = rank, torch.device(device)
        self.use_device()
        torch.manual_seed(seed_for(plan.seed, "fc"))
        self.model = self.make_model()
        self.fc = self.model.fc.module
        if fc_state is not None:
            with checkpoint.going_on_from():
                self.fc.load_state_dict(fc_state)
        self.log = ClickLog(plan.num_embeddings, plan.embedding_dim, seed_for(plan.seed, "teacher"), plan.targets)
        heldout = self.log.batches(HELDOUT_BATCHES, HELDOUT_BAGS, seed_for(plan.seed, "held-out"))
        self.heldout = heldout[self.rank :: dist.get_world_size()]  # they are divided among the trainers

    def run_epoch(self, epoch):
        """Train for an epoch, together with the other trainers; return (seconds, points of the loss curve)."""
        self.use_device()
        plan = self.plan
        self.set_learning_rate(learning_rate(plan, epoch))
        # The seed depends on the rank, so each trainer draws different batches.
        batches = self.log.batches(plan.batches, plan.batch_bags, seed_for(plan.seed, "clicks", self.rank, epoch))
        first_step = (epoch - 1) * plan.batches
        curve, losses = [], collections.deque(maxlen=plan.log_interval)
        started = time.perf_counter()
        for step, loss in enumerate(self.train(batches), start=first_step + 1):
            losses.append(check_finite(loss, "loss", step))
            if step % plan.log_interval == 0:
                curve.append((step, sum(losses) / len(losses)))
        return time.perf_counter() - started, curve

    def train(self, batches):
        """Train on these batches, and yield the loss of each."""
        for batch in batches:
            with torch.profiler.record_function("step"):
                loss = self.step(batch)
            yield loss

    @torch.no_grad()
    def evaluate(self, epoch):
        """Return the model's loss and accuracy on all held-out bags, and the teacher's accuracy on them (a dict).

        All trainers do this at the same time, each with its own part of the bags. All get the same result. Raises
        UserError if training has diverged.
        """
        self.use_device()
        check_replicas(self.fc)  # and no trainer goes on before all have finished their training steps
        totals = torch.zeros(4, dtype=torch.float64)  # loss, correct, the teacher's correct, bags
        for ids_I, offsets_B, target_B in self.heldout:
            logits_BC = self.model(ids_I, offsets_B).cpu()
            teacher_BC = self.log.teacher_logits(ids_I, offsets_B)
            totals[0] += F.cross_entropy(logits_BC, target_B, reduction="sum")
            totals[1] += (logits_BC.argmax(dim=1) == target_B).sum()
            totals[2] += (teacher_BC.argmax(dim=1) == target_B).sum()
            totals[3] += len(target_B)
        dist.all_reduce(totals)  # the sums over all trainers; the parts may differ in size, and some may be empty
        loss, correct, teacher_correct, bags = totals.tolist()
        return {
            "heldout_loss": check_finite(loss / bags, "held-out loss", epoch * self.plan.batches),
            "heldout_accuracy": correct / bags,
            "ceiling_accuracy": teacher_correct / bags,
        }

    def use_device(self):
        if self.device.type == "cuda":
            # Of this thread: a new thread begins on GPU 0, which may be another trainer's. (`fc` is stepped on a thread
            # of torch. That needs no such line: each operation changes to the GPU of its tensors.)
            torch.cuda.set_device(self.device)

    def fc_state(self):
        """Return the state_dict of `fc`, on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.fc.state_dict().items()}


def learning_rate(plan, epoch):
    """Return the learning rate of an epoch: plan.lr in the first half of the run; then it falls linearly towards 0.

    With a constant rate SGD does not come to rest at the optimum. Its accuracy then ends about one percentage point
    lower.
    """
    return plan.lr * min(1.0, 2 * (plan.epochs - epoch + 0.5) / plan.epochs)


def check_replicas(fc):
    """Raise RuntimeError if the trainers' replicas of `fc` differ. All trainers call this at the same time."""
    lowest = parameters_to_vector(fc.parameters()).detach().cpu()
    highest = lowest.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        difference = float((highest - lowest).max())
        raise RuntimeError(f"the trainers' replicas of fc differ by up to {difference:g}")
