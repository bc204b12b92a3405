"""What each trainer does when the master calls it: an epoch of training, and the evaluation after it.

It is not in main.py, because RPC sends a class as the name of its module and its own name. The module of main.py is
called `__main__` only in a rank that was started with main.py, and not in one that another program has started.
"""

import collections
import itertools
import time

import torch

from clicks import ClickLog
from evaluation import draw_heldout, evaluate
from glue import checkpoint
from glue.report import check_finite
from glue.seeds import seed_for


class Training:  # in a trainer, on RPC threads; the master makes one call at a time, to all trainers together
    """The training of one trainer. Source: tutorial, _run_trainer.

    `trainer_class`: the Trainer of the mode; `plan`: the flags on which all ranks agree; `fc_state`: of the checkpoint
    from which the run goes on, or None.
    """

    def __init__(self, trainer_class, emb_rrefs, rank, device, plan, fc_state):
        self.rank, self.device, self.plan = rank, torch.device(device), plan
        self.use_device()
        torch.manual_seed(seed_for(plan.seed, "fc"))
        self.trainer = trainer_class(emb_rrefs, plan.embedding_dim, self.device)
        self.fc = self.trainer.model.fc.module
        if fc_state is not None:
            with checkpoint.going_on_from():
                self.fc.load_state_dict(fc_state)
        self.log = ClickLog(plan.num_embeddings, plan.embedding_dim, seed_for(plan.seed, "teacher"), plan.targets)
        self.heldout = draw_heldout(self.log, plan.seed)

    def use_device(self):
        if self.device.type == "cuda":
            # Of this thread: a new thread begins on GPU 0, which may be another trainer's. (`fc` is stepped on a thread
            # of torch. That needs no such line: each operation changes to the GPU of its tensors.)
            torch.cuda.set_device(self.device)

    def evaluate(self, epoch):
        """Return the figures of the model after this epoch, the same in all trainers: see evaluation.py."""
        self.use_device()
        return evaluate(self.trainer.model, self.log, self.heldout, epoch * self.plan.batches)

    def run_epoch(self, epoch):
        """Train for an epoch, together with the other trainers; return (seconds, points of the loss curve)."""
        self.use_device()
        plan = self.plan
        self.trainer.set_learning_rate(learning_rate(plan, epoch))
        # The seed depends on the rank, so each trainer draws different batches.
        batches = self.log.batches(plan.batches, plan.batch_bags, seed_for(plan.seed, "clicks", self.rank, epoch))
        step = (epoch - 1) * plan.batches
        curve, losses = [], collections.deque(maxlen=plan.log_interval)
        started = time.perf_counter()
        for batch, next_batch in itertools.pairwise([*batches, None]):
            with torch.profiler.record_function("step"):
                loss = self.trainer.step(batch, next_batch)
                step += 1
                losses.append(check_finite(loss, "loss", step))
            if step % plan.log_interval == 0:
                curve.append((step, sum(losses) / len(losses)))
        return time.perf_counter() - started, curve

    def fc_state(self):
        """Return the state_dict of `fc`, on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.fc.state_dict().items()}


# The master calls these two by their names, in all trainers together. If it called the methods through its RRefs, it
# would get Futures of Python, of which wait_all does not raise an error before all of them have ended. But when one
# trainer has failed, the others wait for it in an allreduce.


def evaluate_in(training_rref, epoch):
    return training_rref.local_value().evaluate(epoch)


def run_epoch_in(training_rref, epoch):
    return training_rref.local_value().run_epoch(epoch)


def learning_rate(plan, epoch):
    """Return the learning rate of an epoch: plan.lr in the first half of the run; then it falls linearly towards 0.

    With a constant rate SGD does not come to rest at the optimum. Its accuracy then ends about one percentage point
    lower.
    """
    return plan.lr * min(1.0, 2 * (plan.epochs - epoch + 0.5) / plan.epochs)
