"""A job for test_replay.py: main.py on a few images, with a slow trainer. Rank 0 records each update and replays it.

    python tests/learning/param_server/replay_job.py IMAGES [main.py's own flags]

The replay computes each gradient again in one thread, from the recorded weights of its version and the images of its
batch, and then the update, with torch's SGD.
"""

import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "param_server"))
import torch
import torch.nn.functional as F

import coordinator
import data
import main
import progress
import remote
from glue import launch
from net import Net
from ranks import worker_name

IMAGES = int(sys.argv[1])
SLOW_TRAINER, PAUSE = 1, 0.05
updates = []  # in rank 0, for each: its epoch, its gradients (batch, images, version), and the weights after it
saved = []  # in rank 0, for each checkpoint: (updates, batches of the epoch that are done)


def load_a_few(*which, **part):
    return [digits[:IMAGES].clone() for digits in data.load_digits(*which, **part)]


class SlowBatches(data.Batches):
    def of(self, epoch, numbers):
        for batch in super().of(epoch, numbers):
            time.sleep(PAUSE)
            yield batch


def record(server):
    """Have the updates of this class of servers recorded; return a list that gets the weights before the first one."""
    lead, count_update, first = server.lead, server.count_update, []

    def recorded_lead(self, *how):
        first.append(weights_of(self.model))
        lead(self, *how)

    def recorded_count_update(self, gradients):
        batches = [(self.assignments.dealt[trainer][0], *which) for trainer, *which in gradients]
        count_update(self, gradients)
        updates.append((self.epoch, batches, weights_of(self.model)))

    server.lead, server.count_update = recorded_lead, recorded_count_update
    return first


class RecordingProgress(progress.Progress):
    def after_evaluation(self):
        super().after_evaluation()
        saved.append((self.server.updates, self.server.batch))


class SlowlyClonedNet(Net):
    """If an update could come between the cloning of two layers, it would."""

    def named_parameters(self, *which, **how):
        for each in super().named_parameters(*which, **how):
            time.sleep(0.002)
            yield each


def weights_of(net):
    return torch.cat([param.detach().reshape(-1).clone() for _, param in net.named_parameters()])


def replay(args, first_weights):
    """Return the largest difference between a recorded weight and the same in the replay."""
    digits = load_a_few(args.dataset, args.data_dir, args.seed, train=True)
    batches = data.Batches(*digits, args.batch_size, args.seed)
    versions = [first_weights, *[weights for _, _, weights in updates]]
    net, worst = Net().eval(), 0.0
    vector = torch.nn.Parameter(first_weights.clone())
    optimizer = torch.optim.SGD([vector], lr=args.lr, momentum=args.momentum)
    for step, (epoch, gradients, after) in enumerate(updates):
        total = sum(images for _, images, _ in gradients)
        vector.grad = torch.zeros_like(vector)
        for number, images, version in gradients:
            ((_, inputs, target),) = batches.of(epoch, [number])
            assert len(target) == images
            torch.nn.utils.vector_to_parameters(versions[version], net.parameters())
            gradient = torch.autograd.grad(F.nll_loss(net(inputs), target), list(net.parameters()))
            vector.grad += torch.cat([each.reshape(-1) for each in gradient]) * (images / total)
        optimizer.param_groups[0]["lr"] = args.lr * 0.1 ** (epoch // args.lr_step)
        vector.data.copy_(versions[step])
        optimizer.step()
        worst = max(worst, (vector.detach() - after).abs().max().item())
    return worst


def run_worker(rank, args, job):
    main.load_digits = load_a_few
    if rank == SLOW_TRAINER:
        main.Batches = SlowBatches
    if rank == 0:
        first = record(coordinator.Coordinator)
        main.Progress = RecordingProgress
        remote.Net = SlowlyClonedNet
    main.run_worker(rank, args, job)
    if rank == 0:
        order = [(epoch, gradients) for epoch, gradients, _ in updates]
        print(json.dumps({"updates": order, "saved": saved, "difference": replay(args, *first)}), flush=True)


if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args(sys.argv[2:]), worker_name)
