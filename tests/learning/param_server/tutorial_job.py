"""A job for test_tutorial.py: the ranks of tutorial.py, with a server that records its weights and gradients.

    python tests/learning/param_server/tutorial_job.py WORLD_SIZE BATCHES PORT

Each trainer has BATCHES batches. Dropout is off.
"""

import argparse
import os
import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "param_server"))
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch._C._distributed_autograd import _current_context
from torch.distributed.optim.optimizer import _LocalOptimizer
from torch.func import functional_call
from torch.utils.data import Subset

import tutorial

load_all_digits = tutorial.load_digits


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class Recorder:
    """Records each version of the weights, and each step's gradient with its clones of the weights and its images."""

    def __init__(self):
        self.versions, self.steps, self.calls = [], [], {}
        self.thread = threading.local()
        self.step_of_context, self.step_of_sgd = _LocalOptimizer.step, tutorial.SGD.step
        recorder = self

        def step_of_context(optimizer, cid):
            recorder.thread.cid = cid
            recorder.step_of_context(optimizer, cid)

        def step_of_sgd(optimizer):
            recorder.step(optimizer)

        tutorial.functional_call = self.call
        _LocalOptimizer.step = step_of_context
        tutorial.SGD.step = step_of_sgd

    def call(self, layers, weights, inputs):
        """Replaces functional_call in the forward pass."""
        layers.eval()
        self.calls[_current_context()._context_id()] = flat(weights.values()).clone(), inputs[0].clone()
        return functional_call(layers, weights, inputs)

    def step(self, optimizer):
        """Replaces the step. Torch's own lock allows one at a time."""
        params = optimizer.param_groups[0]["params"]
        before = flat(params).clone()
        if not self.versions:
            self.versions.append(before)
        assert torch.equal(before, self.versions[-1]), "weights have changed between two steps"
        gradient = flat(param.grad for param in params).clone()
        self.step_of_sgd(optimizer)
        self.versions.append(flat(params).clone())
        assert torch.equal(self.versions[-1], before.add(gradient, alpha=-0.03)), "a step of another gradient"
        self.steps.append((self.thread.cid, gradient))

    def check(self, digits):
        """Compute each gradient again in this thread, from its clones of the weights and its batch."""
        label_of = {image.numpy().tobytes(): label for image, label in digits}
        net, late, worst, seen = tutorial.Net().eval(), 0, 0.0, set()
        for number, (cid, gradient) in enumerate(self.steps):
            snapshot, images = self.calls[cid]
            same = [version for version, weights in enumerate(self.versions) if torch.equal(weights, snapshot)]
            assert same, "a torn snapshot: weights of two versions"
            late += same[0] < number
            torch.nn.utils.vector_to_parameters(snapshot, net.parameters())
            names = [image.numpy().tobytes() for image in images]
            target = torch.stack([label_of[name] for name in names])
            seen.update(names)
            expected = torch.autograd.grad(F.nll_loss(net(images), target), list(net.parameters()))
            worst = max(worst, (gradient - flat(expected)).abs().max().item())
        checked = f"checked {len(self.steps)} gradients of {len(seen)} images"
        print(f"{checked}, {late} late, worst difference {worst:.1e}", flush=True)


def run_rank(rank, args, batches, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port

    def few_digits(args, train):
        digits = load_all_digits(args, train)
        return Subset(digits, range((args.world_size - 1) * batches * 32)) if train else digits

    tutorial.load_digits = few_digits
    recorder = Recorder() if rank == 0 else None
    tutorial.get_accuracy = lambda test_loader, model: None  # its calls are outside of a context
    tutorial.run_rank(rank, args)
    if rank == 0:
        recorder.check(few_digits(args, train=True))


if __name__ == "__main__":
    size, count, port = sys.argv[1:]
    arguments = argparse.Namespace(world_size=int(size), seed=1, dataset="synthetic", num_gpus=0)
    mp.spawn(run_rank, (arguments, int(count), port), nprocs=int(size))
