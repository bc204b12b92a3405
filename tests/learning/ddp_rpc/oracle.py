"""What the tests of ddp_rpc compare with: the same training in one process, and shards that are in this process."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

import helpers
from helpers import package_on_path
from local_rpc import RRef
from programs import run_main

with package_on_path("ddp_rpc"):
    from glue.training import seed_for

    import hogwild
    import main
    import pipelined
    import shards
    import sync
    import trainer
    from clicks import ClickLog

SIZES = {"num_embeddings": 50, "embedding_dim": 12, "batch_bags": 6, "batches": 15, "epochs": 2, "lr": 0.05}
FLAGS = [text for name, value in SIZES.items() for text in (f"--{name}", value)]


# ---- one process -----------------------------------------------------------------------------------------------------


def start_of_table(seed=1):
    generator = torch.Generator().manual_seed(seed_for(seed, "table"))
    return torch.randn(SIZES["num_embeddings"], SIZES["embedding_dim"], generator=generator) * shards.INITIAL_STD


def one_process(num_trainers=1, stale_lookups=False, seed=1, epochs=SIZES["epochs"]):
    """Train in a plain loop on the joined batches of all trainers; return (table [N, D], fc's state_dict).

    stale_lookups: look up the sums of a batch before the gradient of the previous batch is applied to the table.
    epochs: the number of epochs to train; a run has SIZES["epochs"].
    """
    args = SimpleNamespace(**SIZES)
    table = start_of_table(seed)
    torch.manual_seed(seed_for(seed, "fc"))
    fc = nn.Linear(args.embedding_dim, 8)
    log = ClickLog(args.num_embeddings, args.embedding_dim, seed_for(seed, "teacher"))
    for epoch in range(1, epochs + 1):
        by_trainer = [
            log.batches(args.batches, args.batch_bags, seed_for(seed, "clicks", rank, epoch))
            for rank in range(num_trainers)
        ]
        lr = trainer.learning_rate(args, epoch)
        table = train(table, fc, zip(*by_trainer, strict=True), lr, 1 / num_trainers, stale_lookups)
    return table, fc.state_dict()


def train(table, fc, updates, lr, table_weight, stale_lookups=False):
    """Train without torch's modules and optimizers: `fc` in place; return the table. `updates`: batches by trainer.

    `fc` gets one update with the mean of the trainers' gradients. The table gets an update with the sum of their
    gradients, multiplied by `table_weight`.
    """
    seen = table  # by the next lookup
    for batches in updates:
        seen = seen.clone().requires_grad_()
        losses = []
        for ids, offsets, target in batches:
            losses.append(F.cross_entropy(fc(F.embedding_bag(ids, seen, offsets, mode="sum")), target))
        of_table, *of_fc = torch.autograd.grad(sum(losses), [seen, *fc.parameters()])
        for parameter, gradient in zip(fc.parameters(), of_fc, strict=True):
            parameter.data -= lr * gradient / len(losses)
        stepped = table - lr * table_weight * of_table
        seen = table if stale_lookups else stepped
        table = stepped
    return table


def heldout_figures(table, fc, seed=1):
    """Return what a run that ends with this table and fc reports of all held-out bags."""
    log = ClickLog(*table.shape, seed_for(seed, "teacher"))
    totals = torch.zeros(3, dtype=torch.float64)
    heldout = log.batches(trainer.HELDOUT_BATCHES, trainer.HELDOUT_BAGS, seed_for(seed, "held-out"))
    for ids, offsets, target in heldout:
        logits = F.linear(F.embedding_bag(ids, table, offsets, mode="sum"), fc["weight"], fc["bias"])
        teacher = log.teacher_logits(ids, offsets)
        right = [(each.argmax(dim=1) == target).double().mean() for each in (logits, teacher)]
        totals += torch.stack([F.cross_entropy(logits, target).double(), *right])
    names = ("heldout_loss", "heldout_accuracy", "ceiling_accuracy")
    return dict(zip(names, (totals / len(heldout)).tolist(), strict=True))


def distributed(tmp_path, *flags, says="held-out loss"):
    """Run main.py; return (table [N, D], fc's state_dict) from its checkpoint."""
    file = tmp_path / "end.pt"
    done = run_main("ddp_rpc", *FLAGS, "--checkpoint", file, *flags)
    assert done.returncode == 0 and done.stderr == "" and says in done.stdout, (done.stdout, done.stderr)
    state = torch.load(file, weights_only=True)["state"]
    return state["table"], state["fc"]


def save_checkpoint(path, table, fc):
    """Write the checkpoint of a run after its first epoch."""
    settings = {"seed": 1, "targets": "teacher", "num_embeddings": len(table), "embedding_dim": table.shape[1]}
    torch.save({"scenario": "ddp_rpc", "settings": settings, "state": {"epoch": 1, "table": table, "fc": fc}}, path)


def largest_difference(one, other):
    """Return that of two models (table, state_dict of fc)."""
    return helpers.largest_difference(*([table, *fc.values()] for table, fc in (one, other)))


# ---- without RPC -----------------------------------------------------------------------------------------------------


def whole_table(all_shards):
    return shards.gather_table([RRef(shard) for shard in all_shards])
