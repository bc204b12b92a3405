"""The loops of the trainers in the modes in which a trainer leads itself, `remote` and `sharded`."""

import itertools
import sys


def run_loops(calls, trainers, epoch, batches, report, counts):
    """Let each trainer train with its share of the batches in a loop of its own, by one long call; wait for all.

    `trainers`: {rank: RRef}; `batches`: their numbers, which are dealt in turn. Raises the error of a trainer that
    fails while the others still train.
    """
    updates = counts.updates - counts.batch  # before the first batch of this epoch
    for place, (trainer, rref) in enumerate(trainers.items()):
        share = batches[place :: len(trainers)]
        calls.add(trainer, rref.rpc_async(timeout=0).run_training_loop(epoch, share))  # timeout=0: no time limit
    losses = itertools.chain(*calls.results().values())
    for batch, loss in sorted(losses):
        report.scalar("loss", loss, updates + batch + 1)  # each batch is an update, nearly in this order


def print_loss(trainer, batch, loss):
    """Print the loss of a batch, in a trainer, in the tutorial's words."""
    # On a terminal, first erase the progress bar, which server1 draws on the line of the cursor, and draws again.
    erase = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{erase}Rank {trainer} training batch {batch} loss {loss}")
