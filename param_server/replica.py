"""Mode `replica`: a trainer computes with a copy of the network, pushes gradients to the server, and gets new weights.

This does not extend remote.py but is another pattern, so read it by itself, in the order of a step: train and
Replica.send (in a trainer), ReplicaServer.push (in a server), Replica.load.
The forward and the backward pass are local, so there is no distributed autograd and no DistributedOptimizer: a gradient
is an argument of a call. A message is as large as the weights. (In mode `remote` it is as large as a batch.)
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

With --num_servers each server has a range of the weights, and applies its part of a push without knowing of the others.
The network's eight parameters are joined into one tensor, because one of them has 98 % of the weights: whole
parameters could not be shared out equally.

trainer is a trainer's rank, an int. Shapes, and suffixes of names (weights_P): P weights in the whole network
(1,199,882), R of them in a server's range, B images in a batch.
"""

import collections
import functools
import math
import threading
from dataclasses import dataclass

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from coordinator import coordinator_rref
from glue import UserError
from glue.report import Meter, check_finite
from glue.seeds import seed_for
from net import Net
from ranks import server_name

replica_server = None  # the one ReplicaServer of this process


def make_server(rank, args, device, coordinator):
    """Make this process's server from its own command line, before init_rpc. `coordinator`: None except in rank 0."""
    global replica_server
    torch.manual_seed(args.seed)
    model = Net()
    weights_P = parameters_to_vector(model.parameters()).detach()
    # A copy, because a slice would keep all P weights in memory.
    weights_R = weights_P[range_of(rank, args.num_servers, len(weights_P))].to(device, copy=True)
    replica_server = ReplicaServer(weights_R, args, coordinator)
    if coordinator:
        coordinator.servers = AllServers(model.to(device), args.num_servers)


def get_replica_server():
    return replica_server


@functools.cache
def server_rref(rank):
    """Return this process's one RRef to the server of a rank."""
    return rpc.remote(server_name(rank), get_replica_server)


def range_of(server, num_servers, size):
    """Return the slice of (P,) that a server (from 0) has. The ranges' lengths differ by one weight at most."""
    return slice(size * server // num_servers, size * (server + 1) // num_servers)


@dataclass
class Push:
    """What a trainer sends to a server: its range of a gradient, summed over `batches` batches of `images` images."""

    trainer: int
    version: int  # of the weights from which it was computed: the server's number of updates when they were read
    images: int
    batches: int
    gradient: torch.Tensor  # (R,)


def train(rank, args, batches, device):
    """Train until the Coordinator has no more assignments. In a trainer."""
    meter = Meter()
    replica = Replica(rank, args, device)
    coordinator = coordinator_rref()
    # timeout=0: no time limit, because this call waits for the slowest trainer and for the evaluation.
    while assignment := coordinator.rpc_sync(timeout=0).next_assignment(rank, batches.size):
        replica.pull()  # others may have pushed since this trainer's last answer
        images_seen = 0  # since the last push
        batches_done = 0
        for step, (batch, data, target) in enumerate(batches.of(assignment.epoch, assignment.batches)):
            with meter.step():
                # Only this thread computes here, so with a seed for each batch, dropout is the same in every run.
                torch.manual_seed(seed_for(args.seed, "dropout", assignment.epoch, batch))
                loss = F.nll_loss(replica.net(data), target)
                check_finite(loss.item(), "loss", batch)
                loss.backward()
                images_seen += len(target)
                batches_done += 1
                # Push after every --sync_every batches, and after the last batch of the assignment.
                if batches_done == args.sync_every or step + 1 == len(assignment.batches):
                    pushes = replica.make_pushes(images_seen, batches_done)
                    if args.overlap:  # while this gradient was computed, the last push was under way
                        replica.wait_for_answer()
                    replica.send(pushes)
                    if not args.overlap:
                        replica.wait_for_answer()
                    images_seen = 0
                    batches_done = 0
                else:
                    replica.step_locally(assignment.lr)
            if (meter.steps - 1) % args.log_interval == 0:
                coordinator.rpc_sync().record_loss(rank, batch, loss.item())
        replica.wait_for_answer()


class Replica:
    """A trainer's copy of the network, and its connections to the servers."""

    def __init__(self, rank, args, device):
        self.rank = rank
        self.device = device
        self.net = Net().to(device).train(not args.no_dropout)
        self.server_rrefs = [server_rref(server) for server in range(args.num_servers)]
        size = sum(param.numel() for param in self.net.parameters())
        self.ranges = [range_of(server, args.num_servers, size) for server in range(args.num_servers)]
        self.versions = []  # of each server's weights
        self.weights_P = None
        self.answers = []  # a Future of each server's answer to the last push, until wait_for_answer() has taken them

    def pull(self):
        """Get the current weights. rpc_async returns a Future at once, so all servers are asked at the same time."""
        self.load(torch.futures.wait_all([rref.rpc_async().pull() for rref in self.server_rrefs]))

    def make_pushes(self, images, batches):
        """Return each server's Push of all gradients since the last one: of so many images, in so many batches."""
        gradient_P = self.gradient().cpu()
        self.net.zero_grad()
        parts = zip(self.versions, self.ranges, strict=True)
        return [Push(self.rank, version, images, batches, gradient_P[part]) for version, part in parts]

    def send(self, pushes):
        """Send each server its Push; return at once."""
        # timeout=0: no time limit, because the server may answer only when slower trainers have caught up.
        for rref, push in zip(self.server_rrefs, pushes, strict=True):
            self.answers.append(rref.rpc_async(timeout=0).push(push))

    def wait_for_answer(self):
        """Wait for the weights that the last push brings. Return at once if they have been loaded already."""
        if self.answers:
            self.load(torch.futures.wait_all(self.answers))
            self.answers = []

    def load(self, answers):
        """Load the weights of all servers, from an answer (version, weights (R,)) of each."""
        self.versions = [version for version, _ in answers]
        self.weights_P = torch.cat([weights_R for _, weights_R in answers]).to(self.device)
        vector_to_parameters(self.weights_P, self.net.parameters())  # the parameters become views of weights_P: no copy

    def step_locally(self, lr):
        """Between two pushes (--sync_every): new weights = those of the last answer - lr * all gradients since then."""
        vector_to_parameters(torch.sub(self.weights_P, self.gradient(), alpha=lr), self.net.parameters())

    def gradient(self):
        """Return all gradients (P,), as a new tensor each time, because RPC may still be sending the last one."""
        return parameters_to_vector(param.grad for param in self.net.parameters())


class ReplicaServer:
    """A range of the weights, the SGD that updates it, and the decision which trainer has to wait. In each server.

    --consistency determines when a push is applied, and when it is answered:

    async    A push is applied and answered at once.
    bounded  It is applied at once. It is answered when its trainer is at most --max_staleness pushes ahead of the
             slowest trainer.
    sync     When each trainer has pushed, the mean of these pushes is applied, and all of them are answered.
    """

    def __init__(self, weights_R, args, coordinator):
        self.sgd = FlatSGD(weights_R, args.momentum)
        self.sync = args.consistency == "sync"
        self.lead = args.max_staleness if args.consistency == "bounded" else math.inf
        self.coordinator = coordinator  # only in rank 0: the updates of server1 stand for those of all servers
        # Held while the weights, or the variables below, are read or changed. Never wait for an RPC while holding it:
        # answers arrive on the same RPC threads that serve calls. If calls that wait for this lock blocked all these
        # threads, the answer could not arrive, and the lock would never be released.
        self.lock = threading.Lock()
        self.version = 0  # number of updates since this process began
        self.lr = None  # of this assignment
        self.expected = {}  # {trainer: how many pushes it makes in this assignment}, without the lost ones
        self.applied = collections.Counter()  # {trainer: how many of them are applied}
        self.unapplied = {}  # {trainer: its Push that was received, but not applied}
        self.unanswered = {}  # {trainer: Future of the answer to its push}
        self.lost = set()

    # Trainers call the next two methods, on RPC threads, several at once.

    def pull(self):
        """Return (version, weights (R,))."""
        with self.lock:
            return self.version, self.sgd.weights.cpu()

    @rpc.functions.async_execution
    def push(self, push):
        """Receive a Push. Answer with (version, weights (R,)) when --consistency allows that this trainer continues.

        Because of async_execution, the trainer gets its answer when the returned Future is completed, by this call or a
        later one. Until then no RPC thread is blocked.
        """
        future = torch.futures.Future()
        trainer = push.trainer
        with self.lock:
            if trainer in self.lost:  # it may only have been stopped for a while
                raise UserError(f"rank {trainer} was lost; its batches go to other trainers")
            if trainer in self.unanswered:
                raise RuntimeError(f"rank {trainer} pushed a gradient before its last push was answered")
            if trainer not in self.at_work():
                raise RuntimeError(f"rank {trainer} sent a gradient after the last batch of its assignment")
            push.gradient = push.gradient.to(self.sgd.weights.device)
            self.unapplied[trainer] = push
            self.unanswered[trainer] = future
            self.update_if_due()
            answers = self.answers_due()
        complete(answers)
        return future

    # The next four methods are called under the lock.

    def update_if_due(self):
        """Update the weights: with each push (async, bounded), or when no trainer's push is missing (sync)."""
        if self.unapplied and (not self.sync or self.at_work() <= self.unapplied.keys()):
            self.update()

    def answers_due(self):
        """Return (Future, answer) of each applied push whose trainer may continue.

        No deadlock: the slowest trainer never waits, and no trainer waits for one whose assignment is done.
        """
        at_work = self.at_work()
        slowest = min((self.applied[trainer] for trainer in at_work), default=math.inf)
        answers = []
        for trainer in self.unanswered.keys() - self.unapplied.keys():
            ahead = self.applied[trainer] - slowest if trainer in at_work else 0
            if ahead <= self.lead:
                answers.append((self.unanswered.pop(trainer), (self.version, self.sgd.weights.cpu())))
        return answers

    def at_work(self):
        """Return the trainers that have pushes left in this assignment."""
        return {trainer for trainer, pushes in self.expected.items() if self.applied[trainer] < pushes}

    def update(self):
        """Update the weights with all pushes that were received and not applied yet."""
        pushes = [self.unapplied[trainer] for trainer in sorted(self.unapplied)]  # by rank: sums repeat to the bit
        self.unapplied.clear()
        self.sgd.step(pushes, self.lr)
        self.applied.update(push.trainer for push in pushes)
        if self.coordinator:
            gradients = [(push.trainer, push.batches, self.version - push.version) for push in pushes]
            self.coordinator.count_update(gradients)
        self.version += 1

    # The Coordinator calls the rest: lose() at any time, the others when all trainers wait.

    def start(self, lr, expected):
        """Begin an assignment. `expected`: {trainer: how many pushes it makes}."""
        with self.lock:
            self.lr = lr
            self.expected = {trainer: pushes for trainer, pushes in expected.items() if trainer not in self.lost}
            self.applied.clear()

    def lose(self, trainer):
        """Go on without a lost trainer, and discard its push if it is not applied yet."""
        with self.lock:
            self.lost.add(trainer)
            self.expected.pop(trainer, None)
            self.unapplied.pop(trainer, None)
            self.unanswered.pop(trainer, None)
            self.update_if_due()  # the lost trainer may have been the last one missing
            answers = self.answers_due()
        complete(answers)

    def state_dict(self):
        """Return (weights (R,), momentum (R,), or (0,) without momentum)."""
        with self.lock:
            return self.sgd.weights.cpu(), self.sgd.velocity.cpu()

    def load_state_dict(self, weights_R, velocity_R):
        with self.lock:
            self.sgd.weights = weights_R.to(self.sgd.weights.device, copy=True)
            if len(velocity_R):
                self.sgd.velocity = velocity_R.to(self.sgd.weights.device, copy=True)


def complete(answers):
    """Answer these pushes, given as (Future, answer). Not called under the lock, because this sends messages."""
    for future, answer in answers:
        future.set_result(answer)


class FlatSGD:
    """The weights as one tensor, and SGD that updates them.

    torch.optim.SGD would change them in place, while RPC may still be sending them in an answer. Here each update makes
    a new tensor, so no answer needs a copy.
    """

    def __init__(self, weights_R, momentum):
        self.weights = weights_R
        self.momentum = momentum
        self.velocity = torch.zeros_like(weights_R) if momentum else torch.empty(0)

    def step(self, pushes, lr):
        """Update the weights as torch.optim.SGD does, with the gradient of one push or the mean of several."""
        gradient_R = pushes[0].gradient
        if len(pushes) > 1:  # the mean over all images: that of one process on the joined batch
            images = sum(push.images for push in pushes)
            gradient_R = sum(push.gradient * (push.images / images) for push in pushes)
        if self.momentum:
            self.velocity = torch.add(gradient_R, self.velocity, alpha=self.momentum)
            gradient_R = self.velocity
        self.weights = torch.sub(self.weights, gradient_R, alpha=lr)


class AllServers:
    """All servers, as the Coordinator calls them. In rank 0."""

    def __init__(self, model, num_servers):
        self.model = model  # to evaluate
        self.num_servers = num_servers

    def start(self, lr, expected):
        torch.futures.wait_all([rref.rpc_async().start(lr, expected) for rref in self.rrefs()])

    def lose(self, trainer):
        torch.futures.wait_all([rref.rpc_async().lose(trainer) for rref in self.rrefs()])

    def rrefs(self):
        return [server_rref(server) for server in range(self.num_servers)]

    def state_dict(self):
        """Return the content of a checkpoint, and load its weights into the model."""
        parts = torch.futures.wait_all([rref.rpc_async().state_dict() for rref in self.rrefs()])
        weights_P = torch.cat([weights_R for weights_R, _ in parts])
        velocity_P = torch.cat([velocity_R for _, velocity_R in parts])
        vector_to_parameters(weights_P.to(next(self.model.parameters()).device), self.model.parameters())
        return {"model": self.model.state_dict(), "momentum": velocity_P}

    def load_state_dict(self, state):
        """Send each server its range of a checkpoint, which may be of another number of servers."""
        self.model.load_state_dict(state["model"])
        weights_P = parameters_to_vector(self.model.parameters()).detach().cpu()
        velocity_P = state["momentum"]
        sent = []
        for server, rref in enumerate(self.rrefs()):
            weights_R = weights_P[range_of(server, self.num_servers, len(weights_P))]
            velocity_R = velocity_P[range_of(server, self.num_servers, len(velocity_P))]
            sent.append(rref.rpc_async().load_state_dict(weights_R, velocity_R))
        torch.futures.wait_all(sent)
