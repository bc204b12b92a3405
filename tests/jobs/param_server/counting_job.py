"""A job for lost_trainers.py: main.py with a network that counts how often each image is applied, and with faults.

python tests/jobs/param_server/counting_job.py IMAGES PAUSE LOST_AFTER FAULTS [main.py's own flags]

The network has one weight for each image, and the loss is minus the mean of a batch's weights. So an image that is
applied raises its own weight, and no other, by learning rate / batch size (`sync`: divided by the number of gradients
in the update). The counts are sent as gradients, and do not depend on the counts that the program itself keeps.

FAULTS: RANK:KIND:SECONDS,..., with the seconds since training began. KIND is SIGKILL, SIGSTOP, exception, or "nap" (the
rank is stopped until the others have lost it, then continued). With 0:evaluation:0 rank 0 is killed when it begins its
second evaluation, unless the job was restarted. With 0:slow:0 rank 0 takes long to find out which batches are left, and
to save, so that trainers are lost meanwhile. PAUSE: seconds per batch.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "param_server"))
import torch
from torch import nn

import assignments
import coordinator
import data
import main
import remote
import replica
from glue import checkpoint, launch, supervisor
from ranks import worker_name

IMAGES, PAUSE, LOST_AFTER = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
supervisor.LOST_AFTER_SECONDS = LOST_AFTER  # in the starting process and in the ranks
FAULTS = {
    int(rank): (kind, float(at)) for rank, kind, at in (each.split(":") for each in sys.argv[4].split(",") if each)
}


class CountingNet(nn.Module):
    def __init__(self, num_gpus=0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(IMAGES))

    def forward(self, x_B):
        return self.weight[x_B.long()].unsqueeze(1)  # (B, 1): nll_loss takes minus the mean


class CountingBatches(data.Batches):
    """Batches that have the numbers of the images in place of the images."""

    fail = threading.Event()

    def of(self, epoch, numbers):
        for number, _, images_B in super().of(epoch, numbers):
            time.sleep(PAUSE)
            if self.fail.is_set():
                raise ValueError("injected fault")
            yield number, images_B.float(), torch.zeros_like(images_B)


def count(net, images, labels):
    """Replaces get_accuracy: print how often each image was applied since the last evaluation."""
    new = net.weight.detach() - count.before
    count.before = net.weight.detach().clone()
    with open("/proc/self/statm") as file:
        megabytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    print(f"counted {(new == 0).sum()} never, min {new.min()}, max {new.max()}, memory {megabytes:.1f}", flush=True)
    return 0.5


count.before = torch.zeros(IMAGES)


def count_and_die(*evaluated):
    if count.before.any():
        os.kill(os.getpid(), signal.SIGKILL)
    return count(*evaluated)


class SlowDict(dict):
    def values(self):
        for value in super().values():
            time.sleep(0.01)
            yield value


class SlowAssignments(assignments.Assignments):
    def deal(self, batches):
        super().deal(batches)
        self.dealt = SlowDict(self.dealt)


def slow_save(*what, save=checkpoint.save):
    time.sleep(0.1)
    save(*what)


def begin_fault(kind, seconds):
    def happen():
        if kind == "exception":
            CountingBatches.fail.set()
        elif kind == "nap":
            subprocess.Popen(["sh", "-c", f"sleep {LOST_AFTER + 2}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os.kill(os.getpid(), getattr(signal, kind))

    timer = threading.Timer(seconds, happen)
    timer.daemon = True
    timer.start()


def run_worker(rank, args, job):
    main.Batches, coordinator.get_accuracy = CountingBatches, count
    main.load_digits = lambda *_, **__: (torch.zeros(IMAGES, 28, 28, dtype=torch.uint8), torch.arange(IMAGES))
    for module in (remote, replica):
        module.Net = CountingNet
    kind, at = FAULTS.get(rank, ("", 0)) if not args.restarts else ("", 0)
    if kind == "evaluation":
        coordinator.get_accuracy = count_and_die
    elif kind == "slow":
        coordinator.Assignments, checkpoint.save = SlowAssignments, slow_save
    elif kind:
        plain = job.on_lost

        def on_lost(*arguments):
            plain(*arguments)
            begin_fault(kind, at)

        job.on_lost = on_lost
    main.run_worker(rank, args, job)


if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args(sys.argv[5:]), worker_name)
