"""What several modes share: the counts of what is applied to the weights, the loops of trainers, the accuracy."""

import collections
import itertools
import sys
import threading

import torch

from data import normalised
from glue.host import share_cores

STATE = ("epoch", "batch", "updates", "images", "stale", "accuracy")  # what a checkpoint has of Counts


class Counts:  # in a server
    """Where in the work the job is, and what has been applied to the weights."""

    def __init__(self):
        self.epoch = 0  # number of epochs that are done
        self.batch = 0  # number of batches of this epoch that are done; it changes when all trainers are idle
        self.updates = 0
        self.images = collections.Counter()  # {epoch: number of images applied}
        self.stale = collections.Counter()  # {staleness: number of gradients that had it}
        self.accuracy = None
        self.new_images = 0  # applied since the start of this process
        self.update_list = None  # a list, if the updates of this process are to be listed; it grows with each of them

    def add_update(self, *gradients):
        """Count an update. `gradients`: (batch, trainer, version, images) of each gradient in it.

        A gradient is of one batch. `version` is the number of updates that the weights had from which it was computed.
        """
        batches, trainers, versions, images = zip(*gradients, strict=True)
        if self.update_list is not None:
            update = {"epoch": self.epoch, "batches": batches, "trainers": trainers, "versions": versions}
            self.update_list.append(update)
        self.stale.update(self.updates - version for version in versions)
        self.images[self.epoch] += sum(images)
        self.new_images += sum(images)
        self.updates += 1

    def state_dict(self):
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state):
        for name in STATE:
            setattr(self, name, state[name])


def run_loops(trainers, epoch, shares, report, log_interval, counts):
    """Let each trainer train with its share of the batches in a loop of its own, by one long call; wait for all.

    `trainers`: RRefs; `shares`: their batches, in the same order.
    """
    updates = counts.updates - counts.batch  # before the first batch of this epoch
    calls = [
        trainer.rpc_async(timeout=0).train(epoch, share, log_interval)  # timeout=0: no time limit
        for trainer, share in zip(trainers, shares, strict=True)
    ]
    ended = threading.Event()
    torch.futures.collect_all(calls).add_done_callback(lambda _: ended.set())
    while not ended.wait(0.5):
        report.bar.update(counts.new_images - report.bar.n)
        torch.futures.wait_all([call for call in calls if call.done()])  # raises if a trainer has failed
    for batch, loss in sorted(itertools.chain(*torch.futures.wait_all(calls))):
        report.scalar("loss", loss, updates + batch + 1)  # each batch is an update, nearly in this order
    report.bar.update(counts.new_images - report.bar.n)


def print_loss(trainer, batch, loss):
    """Print the loss of a batch, in a trainer, in the tutorial's words."""
    # On a terminal, first erase the progress bar, which server1 draws on the line of the cursor, and draws again.
    erase = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{erase}Rank {trainer} training batch {batch} loss {loss}")


@torch.no_grad()
def get_accuracy(net, images, labels):
    """Return the fraction of images (N, 28, 28) uint8 that `net` classifies correctly.

    Runs in the process that has the network. In the tutorial, eval() is called on the trainers' TrainerNet. It does not
    reach the network on the server, whose dropout stays on.
    """
    net.eval()
    device = next(net.parameters()).device
    correct = 0
    threads = torch.get_num_threads()
    share_cores(1)  # no trainer computes now, so this may use all cores
    for batch, target in zip(images.split(500), labels.split(500), strict=True):
        correct += (net(normalised(batch.to(device))).argmax(dim=1).cpu() == target).sum().item()
    torch.set_num_threads(threads)
    return correct / len(labels)
