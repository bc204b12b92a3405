"""What the master calls in each trainer: the training, from the first evaluation to the last.

It is not in main.py, because RPC sends a function as the name of its module and its own name. The module of main.py is
called `__main__` only in a rank that was started with main.py, and not in one that another program has started.
"""

import collections
import itertools

import torch
import torch.distributed as dist

from clicks import ClickLog
from evaluation import check_replicas, draw_heldout, evaluate
from glue import checkpoint
from glue.report import Meter, check_finite
from glue.seeds import seed_for


def run_trainer(trainer_class, emb_rrefs, rank, device, plan, progress_rref, epochs_before, fc_state):
    """Train, together with the other trainers; return a dict with this trainer's results. Source: tutorial,
    _run_trainer.

    Runs in each trainer, on an RPC thread. `trainer_class`: the Trainer of the mode; `plan`: the flags on which all
    ranks agree. A resumed run begins after `epochs_before` epochs, with `fc_state`.
    """
    device = torch.device(device)
    if device.type == "cuda":
        # Of this thread: a new thread begins on GPU 0, which is another trainer's. (`fc` is stepped on another thread.
        # That needs no such line, says torch's source: each operation changes to the GPU of its tensors. Unrun.)
        torch.cuda.set_device(device)
    torch.manual_seed(seed_for(plan.seed, "fc"))
    trainer = trainer_class(emb_rrefs, plan.embedding_dim, device)
    model = trainer.model
    if fc_state is not None:
        with checkpoint.going_on_from():
            model.fc.module.load_state_dict(fc_state)
    log = ClickLog(plan.num_embeddings, plan.embedding_dim, seed_for(plan.seed, "teacher"), plan.targets)
    heldout = draw_heldout(log, plan.seed)
    meter = Meter()
    step = epochs_before * plan.batches
    losses = collections.deque(maxlen=plan.log_interval)  # of the last steps

    figures = evaluate(model, log, heldout, step)  # before the first training step: the accuracy of guessing
    report_epoch(progress_rref, rank, epochs_before, figures, meter.seconds, model)
    for epoch in range(epochs_before + 1, plan.epochs + 1):
        trainer.set_learning_rate(learning_rate(plan, epoch))
        # The seed depends on the rank, so each trainer draws different batches.
        batches = log.batches(plan.batches, plan.batch_bags, seed_for(plan.seed, "clicks", rank, epoch))
        # After the barrier the learning rate is set in all processes, all trainers have drawn their batches, and the
        # master has saved. Until then no trainer changes the table or `fc`, so a checkpoint is of one moment.
        dist.barrier()
        for batch, next_batch in itertools.pairwise([*batches, None]):
            with meter.step():
                loss = trainer.step(batch, next_batch)
                step += 1
                losses.append(check_finite(loss, "loss", step))
            if rank == 0 and step % plan.log_interval == 0:
                progress_rref.rpc_sync().after_step(step, sum(losses) / len(losses))
        figures = evaluate(model, log, heldout, step)
        report_epoch(progress_rref, rank, epoch, figures, meter.seconds, model)
    check_replicas(model)
    return {"seconds": meter.seconds, **figures}


def learning_rate(plan, epoch):
    """Return the learning rate of an epoch: plan.lr in the first half of the run; then it falls linearly towards 0.

    With a constant rate SGD does not come to rest at the optimum. Its accuracy then ends about one percentage point
    lower.
    """
    return plan.lr * min(1.0, 2 * (plan.epochs - epoch + 0.5) / plan.epochs)


def report_epoch(progress_rref, rank, epoch, figures, seconds, model):
    """trainer1 sends the results of an epoch to the master, which saves them."""
    if rank == 0:
        fc_state = {name: tensor.cpu() for name, tensor in model.fc.module.state_dict().items()}
        progress_rref.rpc_sync(timeout=0).after_epoch(epoch, figures, seconds, fc_state)
