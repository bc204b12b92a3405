"""Mode `replica`, the server's side: it has the weights. Trainers push gradients to it, and pull the weights from it.

Runs in the process `parameter_server`, where the trainers call it over RPC.  For several servers: several_servers.py.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

The network's eight parameters are joined into one tensor.  Eight tensors would cost eight times the overhead in each
message, and could not be distributed evenly over several servers, because one of them has 98 % of all weights.

Shapes: P weights in the whole network (1,199,882).
"""

import collections
import functools
import math
import threading
from dataclasses import dataclass

import torch
import torch.distributed.rpc as rpc
from torch.nn.utils import parameters_to_vector

from digits_net import Net
from glue.report import check_finite
from scoreboard import Scoreboard, Work

replica_server = None  # the one ReplicaServer of this process


def make_replica_server(args, device):
    """Make this process's ReplicaServer from its own command line, and return it.  Called before init_rpc."""
    global replica_server
    replica_server = ReplicaServer(args, device)
    return replica_server


def get_replica_server():
    """Return this process's ReplicaServer.  It only reads, so it needs no lock."""
    return replica_server


@dataclass
class Push(Work):
    """What a trainer sends: the gradient of one or more batches, and which batches these were (see Work)."""

    gradient: torch.Tensor  # (P,)


class FlatSGD:
    """The weights of the network, or of a part of it, as one tensor, and SGD that updates them.

    Each update makes a new tensor. So an answer that is being sent, or a checkpoint that is being written, can keep the
    old tensor without a copy.
    """

    def __init__(self, weights_P, momentum):
        self.weights = weights_P
        self.momentum = momentum
        self.velocity = torch.zeros_like(weights_P) if momentum else torch.empty(0)

    def step(self, pushes, lr):
        """Update the weights as torch.optim.SGD does, with the gradient of one push or the mean of several."""
        gradient_P = pushes[0].gradient
        if len(pushes) > 1:  # the mean over all images: that of one process on the joined batch
            images = sum(push.images for push in pushes)
            gradient_P = sum(push.gradient * (push.images / images) for push in pushes)
        if self.momentum:
            self.velocity = torch.add(gradient_P, self.velocity, alpha=self.momentum)
            gradient_P = self.velocity
        self.weights = torch.sub(self.weights, gradient_P, alpha=lr)

    def state(self):
        """Return (weights (P,), momentum (P,) or (0,)), ready to be sent."""
        return self.weights.cpu(), self.velocity.cpu()

    def load(self, weights_P, velocity_P):
        """Copy the weights and the momentum of a checkpoint."""
        self.weights = weights_P.to(self.weights.device, copy=True)
        if len(velocity_P):
            self.velocity = velocity_P.to(self.weights.device, copy=True)


class ReplicaServer:
    """The weights, the SGD that updates them, and the decision which trainer has to wait.

    --consistency determines when a push is applied, and when it is answered:

    async    A push is applied and answered at once.
    bounded  It is applied at once. It is answered when its trainer is at most --max_staleness pushes ahead of the
             slowest trainer.
    sync     When each trainer has pushed, the mean of these pushes is applied, and all of them are answered.
    """

    def __init__(self, args, device):
        self.device = device
        self.lr = args.lr
        self.sync = args.consistency == "sync"
        self.lead = {"async": math.inf, "bounded": args.max_staleness, "sync": 0}[args.consistency]
        torch.manual_seed(args.seed)
        self.model = Net().to(device)  # has the first weights; later it is used to evaluate
        self.sgd = FlatSGD(parameters_to_vector(self.model.parameters()).detach(), args.momentum)
        # Held while the weights, or the variables below, are read or changed.  Never wait for an RPC while holding it:
        # answers arrive on the same RPC threads that serve calls.  If calls that wait for this lock blocked all these
        # threads, the answer could not arrive, and the lock would never be released.
        self.lock = threading.Lock()
        self.clock = collections.Counter()  # trainer -> number of its pushes in this assignment
        self.unapplied = {}  # trainer -> its Push that was received, but not applied
        self.unanswered = {}  # trainer -> Future of the answer to its push
        self.scoreboard = Scoreboard(args, self)

    # ---------------------------------------------------------------------- called by the trainers, over RPC

    def get_scoreboard(self):
        """Return an RRef to the job's Scoreboard.  It only reads, so it needs no lock."""
        return rpc.RRef(self.scoreboard)

    def pull(self):
        """Return the current version and weights: see answer().  May be called by all trainers at once (locked)."""
        with self.lock:
            return self.answer()

    @rpc.functions.async_execution
    def push(self, push):
        """Receive a Push.  Answer with answer() when --consistency allows that this trainer continues.

        Because of async_execution, the trainer gets its answer when the returned Future is completed, by this call or a
        later one.  Until then no RPC thread is blocked.  May be called by all trainers at once (locked).
        """
        future = torch.futures.Future()
        with self.lock:
            self.take_in(push)
            self.unanswered[push.trainer] = future
            answers = self.go_on()
        complete(answers)
        return future

    # ---------------------------------------------------------------------- called while this class holds its lock

    def take_in(self, push):
        """Record a push.  Raise RuntimeError if the trainer was lost, or if its last push is not answered yet."""
        self.scoreboard.batch_of(push.trainer)  # raises if this trainer was lost
        if push.trainer in self.unanswered:
            raise RuntimeError(f"trainer_{push.trainer} pushed a gradient before its last push was answered")
        push.gradient = push.gradient.to(self.device)
        self.unapplied[push.trainer] = push
        self.clock[push.trainer] += 1

    def go_on(self):
        """Make the next update if its pushes are complete.  Return (Future, answer) of each push to answer now."""
        if self.is_update_complete():
            self.make_update()
        answers = []
        for trainer in self.trainers_to_answer():
            answers.append((self.unanswered.pop(trainer), self.answer()))
        return answers

    def is_update_complete(self):
        """Return whether the next update has all its pushes: one of each trainer in `sync`, otherwise any one."""
        if self.sync:
            return bool(self.unapplied) and self.scoreboard.at_work() <= self.unapplied.keys()
        return bool(self.unapplied)

    def make_update(self):
        """Update the weights with all pushes that were received and not applied yet."""
        pushes = [self.unapplied[trainer] for trainer in sorted(self.unapplied)]  # by rank: sums repeat to the bit
        self.unapplied.clear()
        checkpoint_due = self.scoreboard.count_update(pushes)
        self.apply(pushes)
        if checkpoint_due:
            self.save_soon()

    def apply(self, pushes):
        """Make one optimizer step with these pushes."""
        self.sgd.step(pushes, self.lr)

    def trainers_to_answer(self):
        """Return the trainers that wait for an answer and may get it, because they are not too far ahead."""
        # No deadlock: the slowest trainer never waits, and no trainer waits for one whose assignment is done.
        at_work = self.scoreboard.at_work()
        slowest = min((self.clock[trainer] for trainer in at_work), default=0)
        ahead = {trainer: self.clock[trainer] - slowest if trainer in at_work else 0 for trainer in self.unanswered}
        return [trainer for trainer in self.unanswered if ahead[trainer] <= self.lead]

    def answer(self):
        """Return (version, weights (P,)).  The version is the number of updates so far."""
        return self.scoreboard.updates, self.sgd.weights.cpu()

    # ---------------------------------------------------------------------- called by the Scoreboard, in this process

    def start_assignments(self, lr):
        """Set the learning rate, and count pushes from 0.  All trainers are waiting for this."""
        with self.lock:  # because a trainer may be lost at any moment
            self.lr = lr
            self.clock.clear()

    def forget(self, trainer):
        """Remove a lost trainer from the living ones, and discard its push if it is not applied yet."""
        with self.lock:
            self.scoreboard.living.remove(trainer)
            self.unapplied.pop(trainer, None)
            self.unanswered.pop(trainer, None)
            answers = self.go_on()
        complete(answers)

    def capture(self):
        """Return the content of a checkpoint, and load its weights into the model.  All trainers are waiting."""
        state = self.checkpoint_of(*self.sgd.state())
        self.model.load_state_dict(state["model"])
        return state

    def restore(self, state):
        """Continue from what capture() returned.  Called before init_rpc."""
        self.model.load_state_dict(state["model"])
        self.sgd.load(parameters_to_vector(self.model.parameters()).detach(), state["momentum"])

    def save_soon(self):
        """Let the Scoreboard's writer thread save the current weights.  Called under the lock."""
        self.scoreboard.save_soon(functools.partial(self.checkpoint_of, *self.sgd.state()))

    def checkpoint_of(self, weights_P, velocity_P):
        """Return the content of a checkpoint.  The weights are by name, as views of weights_P."""
        check_finite(weights_P.sum(), "sum of the weights", self.scoreboard.updates)
        by_name = {}
        start = 0
        for name, param in self.model.named_parameters():
            by_name[name] = weights_P[start : start + param.numel()].view_as(param)
            start += param.numel()
        return {"model": by_name, "momentum": velocity_P}


def complete(answers):
    """Answer these pushes, given as (Future, answer).  Not called under the lock, because this sends messages."""
    for future, answer in answers:
        future.set_result(answer)
