"""Mode `replica`, the server's side: all weights, to which trainers push gradients and which they pull.

Runs in the process `parameter_server`, called by the trainers over RPC.  Several servers: several_servers.py.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.  All weights are one
tensor: eight would be eight messages' overhead per step, and one of them is 98 % of the network.

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
from glue.tensors import to_wire
from scoreboard import Scoreboard, Work

replica_server = None  # the one ReplicaServer of this process


def make_replica_server(args, device):
    """Make this process's ReplicaServer, from its own command line, and return it.  Before RPC begins."""
    global replica_server
    replica_server = ReplicaServer(args, device)
    return replica_server


def get_replica_server():
    """Return this process's ReplicaServer.  May be called by all trainers at once: it only reads."""
    return replica_server


@dataclass
class Push(Work):
    """What a trainer sends: the gradient of one or more batches, and the Work that it is of."""

    gradient: torch.Tensor  # (P,)


class FlatSGD:
    """Weights that are one tensor, of the whole network or of a part of it, and SGD on them.

    No tensor is changed in place, so an answer that is on its way, or a checkpoint, keeps what it was given uncopied.
    """

    def __init__(self, weights_P, momentum):
        self.weights = weights_P
        self.momentum = momentum
        self.velocity = torch.zeros_like(weights_P) if momentum else torch.empty(0)

    def step(self, pushes, lr):
        """Step once, as torch.optim.SGD does, by the gradient of a push or the mean of several."""
        gradient_P = pushes[0].gradient
        if len(pushes) > 1:  # the mean over all images, as one process on the joined batch has it
            images = sum(push.images for push in pushes)
            gradient_P = sum(push.gradient * (push.images / images) for push in pushes)
        if self.momentum:
            self.velocity = torch.add(gradient_P, self.velocity, alpha=self.momentum)
            gradient_P = self.velocity
        self.weights = torch.sub(self.weights, gradient_P, alpha=lr)

    def state(self):
        """Return (weights (P,), momentum (P,) or (0,)), as they cross the wire."""
        return to_wire(self.weights), to_wire(self.velocity)

    def load(self, weights_P, velocity_P):
        """Take a copy of the weights and the momentum of a checkpoint."""
        self.weights = weights_P.to(self.weights.device, copy=True)
        if len(velocity_P):
            self.velocity = velocity_P.to(self.weights.device, copy=True)


class ReplicaServer:
    """The weights, the SGD that changes them, and the decision who waits for whom.

    --consistency says when a push is applied, and when it is answered:

    async    applied at once, answered at once
    bounded  applied at once, answered when the trainer is at most --max_staleness pushes ahead of the slowest
    sync     applied when one of each trainer is here, as their average; answered then
    """

    def __init__(self, args, device):
        self.device = device
        self.lr = args.lr
        self.sync = args.consistency == "sync"
        self.lead = {"async": math.inf, "bounded": args.max_staleness, "sync": 0}[args.consistency]
        torch.manual_seed(args.seed)
        self.model = Net().to(device)  # the start; later to evaluate
        self.sgd = FlatSGD(parameters_to_vector(self.model.parameters()).detach(), args.momentum)
        # Held while the weights, or what follows, are read or changed.  No RPC is waited for while it is held: answers
        # arrive on the same threads that serve calls; if the other calls waited for the lock on all of these, the
        # answer that lets go of it could never come.
        self.lock = threading.Lock()
        self.clock = collections.Counter()  # trainer -> its pushes since it got its assignment
        self.unapplied = {}  # trainer -> its Push that is here, and in no update yet
        self.unanswered = {}  # trainer -> Future of the answer to its push
        self.scoreboard = Scoreboard(args, self)

    # ---------------------------------------------------------------------- called by the trainers, over RPC

    def get_scoreboard(self):
        """Return an RRef to the job's Scoreboard.  Reads only: needs no lock."""
        return rpc.RRef(self.scoreboard)

    def pull(self):
        """Return the weights of now, as answer() has them.  May be called by all trainers at once (locked)."""
        with self.lock:
            return self.answer()

    @rpc.functions.async_execution
    def push(self, push):
        """Take in a Push; the answer is the weights, as answer() has them, when --consistency lets the trainer go on.

        The caller gets it when somebody completes this Future, so that a trainer that is held back occupies no RPC
        thread. May be called by all trainers at once (locked).
        """
        future = torch.futures.Future()
        with self.lock:
            self.take_in(push)
            self.unanswered[push.trainer] = future
            answers = self.go_on()
        complete(answers)
        return future

    # ---------------------------------------------------------------------- what happens to a push; under the lock

    def take_in(self, push):
        """Note a push.  Raises RuntimeError where the trainer was lost, or still waits for an answer."""
        self.scoreboard.batch_of(push.trainer)  # refuses a trainer that was lost
        if push.trainer in self.unanswered:
            raise RuntimeError(f"trainer_{push.trainer} pushed a gradient before its last push was answered")
        push.gradient = push.gradient.to(self.device)
        self.unapplied[push.trainer] = push
        self.clock[push.trainer] += 1

    def go_on(self):
        """Make an update if it is complete; return (Future, answer) of each push that need not wait any longer."""
        if self.is_update_complete():
            self.make_update()
        answers = []
        for trainer in self.trainers_to_answer():
            answers.append((self.unanswered.pop(trainer), self.answer()))
        return answers

    def is_update_complete(self):
        """Return whether all pushes are here that belong to the next update: any one, or with sync one of each."""
        if self.sync:
            return bool(self.unapplied) and self.scoreboard.at_work() <= self.unapplied.keys()
        return bool(self.unapplied)

    def make_update(self):
        """Change the weights by the pushes that are here."""
        pushes = [self.unapplied[trainer] for trainer in sorted(self.unapplied)]  # one order, whoever came first
        self.unapplied.clear()
        checkpoint_due = self.scoreboard.count_update(pushes)
        self.apply(pushes)
        if checkpoint_due:
            self.save_soon()

    def apply(self, pushes):
        """Step once, by all of these pushes."""
        self.sgd.step(pushes, self.lr)

    def trainers_to_answer(self):
        """Return the trainers that wait for an answer, and are not too far ahead of the slowest."""
        # The slowest is never held back, and nobody waits for a trainer whose assignment is done: no deadlock.
        at_work = self.scoreboard.at_work()
        slowest = min((self.clock[trainer] for trainer in at_work), default=0)
        ahead = {trainer: self.clock[trainer] - slowest if trainer in at_work else 0 for trainer in self.unanswered}
        return [trainer for trainer in self.unanswered if ahead[trainer] <= self.lead]

    def answer(self):
        """Return (version, weights (P,)).  The version of weights: how many updates have made them."""
        return self.scoreboard.updates, to_wire(self.sgd.weights)

    # ---------------------------------------------------------------------- called by the Scoreboard, in this process

    def start_assignments(self, lr):
        """Begin with the assignments that the Scoreboard has made.  All trainers are waiting."""
        with self.lock:  # a trainer may be lost at any moment
            self.lr = lr
            self.clock.clear()

    def forget(self, trainer):
        """Strike a trainer that is lost off the living: what is here of it and not applied never will be."""
        with self.lock:
            self.scoreboard.living.remove(trainer)
            self.unapplied.pop(trainer, None)
            self.unanswered.pop(trainer, None)
            answers = self.go_on()
        complete(answers)

    def capture(self):
        """Return what a checkpoint needs, and lay it under the model.  All trainers are waiting."""
        state = self.checkpoint_of(*self.sgd.state())
        self.model.load_state_dict(state["model"])
        return state

    def restore(self, state):
        """Go on from what capture() returned.  Before RPC begins."""
        self.model.load_state_dict(state["model"])
        self.sgd.load(parameters_to_vector(self.model.parameters()).detach(), state["momentum"])

    def save_soon(self):
        """Let the Scoreboard's writer save the weights of now.  Under the lock."""
        self.scoreboard.save_soon(functools.partial(self.checkpoint_of, *self.sgd.state()))

    def checkpoint_of(self, weights_P, velocity_P):
        """Return what a checkpoint keeps of weights and momentum; the weights by name, as views of these."""
        check_finite(weights_P.sum(), "sum of the weights", self.scoreboard.updates)
        by_name = {}
        start = 0
        for name, param in self.model.named_parameters():
            by_name[name] = weights_P[start : start + param.numel()].view_as(param)
            start += param.numel()
        return {"model": by_name, "momentum": velocity_P}


def complete(answers):
    """Answer these pushes: (Future, answer) of each.  Not under the lock."""
    for future, answer in answers:
        future.set_result(answer)
