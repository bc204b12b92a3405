"""The Coordinator, in rank 0: hands out batches, and evaluates and saves when all trainers wait for the next ones.

It is the same in both modes. Trainers call next_assignment and record_loss; the server in rank 0 calls count_update.
"""

import math
import threading
from dataclasses import dataclass

import torch
import torch.distributed.rpc as rpc

from assignments import Assignments
from data import load_digits, normalised
from glue import UserError, checkpoint
from glue.host import all_cores
from glue.report import check_finite
from progress import Progress
from ranks import server_name, trainers

coordinator = None  # of this process, if it is rank 0


def make_coordinator(args, resume_keys):
    global coordinator
    coordinator = Coordinator(args, resume_keys)
    return coordinator


def get_coordinator():
    return coordinator


def coordinator_rref():
    """Return an RRef to the Coordinator, for a trainer."""
    return rpc.remote(server_name(0), get_coordinator)


@dataclass
class Assignment:
    """The batches that a trainer does next."""

    epoch: int  # from 0
    lr: float
    batches: list  # their numbers


class Coordinator:
    """Leads one job.

    An assignment ends where an evaluation or a checkpoint is due. Then all trainers wait, so nothing changes meanwhile.
    """

    def __init__(self, args, resume_keys):
        """`resume_keys`: flags that must be equal in a run that continues from a checkpoint of this one."""
        self.args = args
        self.settings = {key: vars(args)[key] for key in resume_keys}
        # Set by the mode's make_server: offers start, lose, state_dict, load_state_dict, and `model` to evaluate.
        self.servers = None
        self.progress = Progress(args)
        self.test_images, self.test_labels = load_digits(args.dataset, args.data_dir, args.seed, train=False)
        # The lock protects what follows. A server may hold its own lock when it takes this one, never the other way.
        self.lock = threading.Lock()
        self.assignments = Assignments(trainers(args))
        self.epoch = 0
        self.epoch_begun = False
        self.updates = 0
        self.evaluate_at = 0  # number of the first batch after the next evaluation
        self.saved_at = 0  # `updates` at the last checkpoint
        self.waiting = {}  # {trainer: Future of its next Assignment}
        self.size = None  # images in the training set
        self.started = False

    # Trainers call the next two methods, on RPC threads, several at once.

    @rpc.functions.async_execution
    def next_assignment(self, trainer, size):
        """Answer with an Assignment when all living trainers have called this, or with None if the work is done.

        `size`: images in the training set. Because of async_execution, trainers that wait block no RPC thread. The last
        trainer's call also runs the evaluation.
        """
        answer = torch.futures.Future()
        with self.lock:
            if trainer not in self.assignments.living:
                raise UserError(f"rank {trainer} was lost; its batches go to other trainers")
            if trainer in self.waiting:
                raise RuntimeError(f"rank {trainer} asked for batches before its last request was answered")
            self.size = size
            self.waiting[trainer] = answer
        self.go_on_if_everybody_is_here()
        return answer

    def record_loss(self, trainer, batch, loss):
        with self.lock:
            self.progress.loss(trainer, batch, loss, self.updates)

    def count_update(self, gradients):
        """Count one update of the weights. `gradients`: (trainer, batches, staleness) of each.

        Called under the server's lock, so that no trainer can read the new weights before.
        """
        with self.lock:
            for trainer, count, staleness in gradients:
                images = sum(map(self.images_in, self.assignments.apply(trainer, count)))
                self.progress.after_step(images, staleness)
            self.updates += 1

    def images_in(self, batch):
        return min(self.args.batch_size, self.size - batch * self.args.batch_size)

    def on_lost(self, trainer):
        """Go on without a trainer (--on_lost continue); return a few words about its batches. On a job's thread."""
        self.servers.lose(trainer)  # after this, none of its gradients is applied
        with self.lock:
            left = self.assignments.lose(trainer)
            self.waiting.pop(trainer, None)
        self.go_on_if_everybody_is_here()
        return f"batches of this epoch that go to the others: {left}" if left else ""

    def start(self):
        """With --resume, load the checkpoint. Then let the trainers begin. On the main thread, after init_rpc."""
        state = checkpoint.resume(self.args, "param_server", self.settings)
        if state is not None:
            try:
                self.load_state_dict(state["progress"])
                self.servers.load_state_dict(state)
            except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
                raise UserError(f"cannot go on from {self.args.checkpoint}: {error}") from error
            self.progress.start(self.updates, self.epoch, nothing_left=self.epoch >= self.args.epochs)
        self.started = True
        self.go_on_if_everybody_is_here()

    def go_on_if_everybody_is_here(self):
        """If all living trainers wait: save, evaluate, or end the epoch, as is due, and answer with new assignments."""
        with self.lock:
            living = self.assignments.living
            if not (self.started and living and living <= self.waiting.keys()):
                return
            waiting = self.waiting
            self.waiting = {}
            left = self.assignments.left()
        self.progress.trainers_wait()
        if self.args.checkpoint and self.updates - self.saved_at >= self.args.checkpoint_every:
            self.save()
        if self.epoch_begun and not left:
            self.finish_epoch()
        elif self.epoch_begun and left[0] >= self.evaluate_at:
            self.evaluate()
            self.progress.within_epoch(self.epoch + 1, self.updates)
        assignments = self.assign() if self.epoch < self.args.epochs else {}
        self.progress.trainers_work()
        for trainer, future in waiting.items():
            future.set_result(assignments.get(trainer))

    def assign(self):
        """Deal batches up to the next evaluation or checkpoint; return {trainer: Assignment}."""
        lr = self.args.lr * 0.1 ** (self.epoch // self.args.lr_step) if self.args.lr_step else self.args.lr
        with self.lock:
            if not self.epoch_begun:
                self.epoch_begun = True
                self.assignments.begin(range(self.batches_in_epoch()))
                self.progress.images_applied.append(0)
            part = math.ceil(self.batches_in_epoch() / self.args.evaluations)
            self.evaluate_at = (self.assignments.left()[0] // part + 1) * part
            self.assignments.deal(self.evaluate_at, self.batches_until_checkpoint())
            dealt = {trainer: batches.copy() for trainer, batches in self.assignments.dealt.items()}
        # How many steps (remote) or pushes (replica) each trainer makes:
        self.servers.start(lr, {trainer: math.ceil(len(dealt[trainer]) / self.args.sync_every) for trainer in dealt})
        return {trainer: Assignment(self.epoch, lr, batches) for trainer, batches in dealt.items()}

    def batches_in_epoch(self):
        """Return how many batches the trainers do together in an epoch."""
        count = math.ceil(self.size / self.args.batch_size)
        if self.args.max_batches:
            count = min(count, self.args.max_batches * len(trainers(self.args)))
        return count

    def batches_until_checkpoint(self):
        """Return how many batches can be dealt before a checkpoint is due; None: all."""
        if not self.args.checkpoint:
            return None
        gradients = len(self.assignments.living) if self.args.consistency == "sync" else 1  # in an update
        updates = max(1, self.args.checkpoint_every - (self.updates - self.saved_at))
        return updates * gradients * self.args.sync_every

    def finish_epoch(self):
        self.evaluate()
        self.epoch += 1
        self.epoch_begun = False
        self.progress.after_epoch(self.epoch, self.updates)
        if self.args.checkpoint:
            self.save()

    def evaluate(self):
        self.current_weights()  # brings them into servers.model
        accuracy = get_accuracy(self.servers.model, self.test_images, self.test_labels)
        self.progress.after_evaluation(accuracy, self.updates)

    def current_weights(self):
        state = self.servers.state_dict()
        for name, weights in state["model"].items():
            check_finite(weights.sum(), f"sum of the weights {name}", self.updates)
        return state

    def save(self):
        state = {"progress": self.state_dict()} | self.current_weights()
        checkpoint.save(self.args.checkpoint, "param_server", self.settings, state)
        self.saved_at = self.updates

    def state_dict(self):
        return {
            "epoch": self.epoch,
            "updates": self.updates,
            "evaluate_at": self.evaluate_at,
            "left": self.assignments.left() if self.epoch_begun else None,
        } | self.progress.state_dict()

    def load_state_dict(self, state):
        self.epoch = state["epoch"]
        self.updates = state["updates"]
        self.saved_at = self.updates
        self.evaluate_at = state["evaluate_at"]
        self.epoch_begun = state["left"] is not None
        self.assignments.begin(state["left"] or [])
        self.progress.load_state_dict(state)


@torch.no_grad()
def get_accuracy(net, images, labels):
    """Return the fraction of images (N, 28, 28) uint8 that `net` classifies correctly.

    Runs in the process that has the network. In the tutorial, eval() is called on the trainers' TrainerNet. It does not
    reach the network on the server, whose dropout stays on.
    """
    net.eval()
    device = next(net.parameters()).device
    correct = 0
    with all_cores():  # no trainer computes now
        for batch, target in zip(images.split(500), labels.split(500), strict=True):
            correct += (net(normalised(batch.to(device))).argmax(dim=1).cpu() == target).sum().item()
    return correct / len(labels)
