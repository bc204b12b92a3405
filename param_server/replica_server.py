"""Mode `replica`, the server's side: a range of the weights, which trainers push gradients to and pull from.

Runs in the processes `parameter_server`, `parameter_server_1`, ... (--num_servers), called by the trainers over RPC.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.  All weights are one
tensor: eight would be eight messages' overhead per step, and one of them is 98 % of the network.

With several servers a push is in parts, and a trainer may die when only some have arrived. So all servers but the first
hold their part, until the first one, which gets its part last, has applied it; then they do the same, from its log. A
push is applied by every server or by none, and by all in the same order.

One rule for whatever runs here: no RPC is waited for while the lock is held.  Answers arrive on the same threads that
serve calls; if the other calls waited for the lock on all of these, the answer that lets go of it could never come.

Shapes: P weights in the whole network (1,199,882), R of them in one server's range.
"""

import collections
import functools
import math
import threading

import torch
import torch.distributed.rpc as rpc
from torch.nn.utils import parameters_to_vector

from digits_net import Net
from glue.report import check_finite
from glue.tensors import to_wire
from rpc_names import range_of, server_name
from scoreboard import Scoreboard

range_server = None  # the one RangeServer of this process
# One update: by whose pushes, with which learning rate, and whether to capture the weights that come of it.
Order = collections.namedtuple("Order", "trainers lr capture", defaults=((), 0.0, False))


def make_range_server(rank, args, device):
    """Make this process's RangeServer, from its own command line, and return it.  Before RPC begins."""
    global range_server
    range_server = FirstServer(args, device) if rank == 0 else RangeServer(rank, args, device)
    return range_server


def get_range_server():
    """Return this process's RangeServer.  May be called by all trainers at once: it only reads."""
    return range_server


@functools.cache
def server_rref(index):
    """Return an RRef to a RangeServer, in whatever process this is."""
    return rpc.remote(server_name(index), get_range_server)


class RangeServer:
    """A range of the weights, and the SGD that changes them.

    No tensor is changed in place, so an answer that is on its way, or a checkpoint, keeps what it was given uncopied.
    """

    def __init__(self, index, args, device):
        self.device, self.momentum = device, args.momentum
        torch.manual_seed(args.seed)
        self.model = Net(dropout=not args.no_dropout).to(device)  # the start; on the first server also to evaluate
        weights_P = parameters_to_vector(self.model.parameters()).detach()
        self.weights = weights_P[range_of(index, args.num_servers, len(weights_P))].clone()
        self.velocity = torch.zeros_like(self.weights) if args.momentum else torch.empty(0)
        self.lock = threading.Lock()  # held while these, or what follows, are read or changed
        self.version = 0  # Orders carried out
        self.held = {}  # trainer -> (gradient (R,), images) that is here and not applied
        self.captured = {}  # version -> (weights (R,), momentum (R,) or (0,)) after an Order that says so

    def start_from(self, weights_R, velocity_R):
        """Take the weights and the momentum of a checkpoint.  Called by the first server, before any push (locked)."""
        with self.lock:
            self.weights = weights_R.to(self.device, copy=True)
            if len(velocity_R):
                self.velocity = velocity_R.to(self.device, copy=True)

    def hold(self, trainer, gradient_R, images):
        """Keep a part of a push, not the first, until the log says what becomes of it.  Called by trainers (locked)."""
        with self.lock:
            if trainer in self.held:
                raise RuntimeError(f"trainer_{trainer} sent a part of a push before its last push was applied here")
            self.held[trainer] = gradient_R.to(self.device), images

    def catch_up(self, start, log):
        """Carry out what is new of the first server's Orders number `start` to now; return the weights (R,) then.

        May be called by all trainers at once (locked).
        """
        with self.lock:
            self.carry_out_new(start, log)
            return to_wire(self.weights)

    def captured_at(self, version, start, log):
        """Catch up; return what was captured at `version`.  Called by the first server, for a checkpoint (locked)."""
        with self.lock:
            self.carry_out_new(start, log)
            return self.captured.pop(version)

    def carry_out_new(self, start, log):
        """Carry out those of the Orders number `start` to now that were not carried out here yet.  Under the lock."""
        assert start <= self.version, "a trainer brought a log that does not go back to what was carried out here"
        for order in log[self.version - start :]:
            self.carry_out(order)

    def carry_out(self, order):
        """Step once, as torch.optim.SGD does, by the gradient that is held of one trainer or the mean of several."""
        self.version += 1
        if gradients := [self.held.pop(trainer) for trainer in order.trainers]:
            gradient_R, total = gradients[0][0], sum(images for _, images in gradients)
            if len(gradients) > 1:  # the mean over all images, as one process on the joined batch has it
                gradient_R = sum(gradient * (images / total) for gradient, images in gradients)
            if self.momentum:
                gradient_R = self.velocity = torch.add(gradient_R, self.velocity, alpha=self.momentum)
            self.weights = torch.sub(self.weights, gradient_R, alpha=order.lr)
        if order.capture:
            self.captured[self.version] = to_wire(self.weights), to_wire(self.velocity)


class FirstServer(RangeServer):
    """The first server: it decides who waits for whom, and keeps the job's Scoreboard.

    --consistency says when a push is applied, and when it is answered:

    async    applied at once, answered at once
    bounded  applied at once, answered when the trainer is at most --max_staleness pushes ahead of the slowest
    sync     applied when one of each trainer is here, as their average; answered then
    """

    def __init__(self, args, device):
        super().__init__(0, args, device)
        self.num_servers, self.sync = args.num_servers, args.consistency == "sync"
        self.lead = {"async": math.inf, "bounded": args.max_staleness, "sync": 0}[args.consistency]
        self.clock = {}  # trainer whose lot of batches is not done -> its pushes in this lot
        self.collected = {}  # trainer -> (version, images, batches) of its push that is here and not applied
        self.waiting = {}  # trainer -> (Future of its unanswered push, version)
        self.start, self.log, self.lr = 0, [], args.lr  # Orders from number `start` on, if there are more servers
        self.restored = None  # (weights (P,), momentum (P,) or (0,)), until all servers have their range of it
        self.scoreboard = Scoreboard(args, self)

    def pull(self, version):
        """Return the answer to a trainer that has weights of `version`.  All trainers may call at once (locked)."""
        with self.lock:
            return self.answer(version)

    @rpc.functions.async_execution
    def push(self, trainer, version, gradient_R, images, batches):
        """Apply a gradient (R,) computed on weights of `version`; answer like pull(), with the weights after it.

        The caller gets the answer when somebody completes this Future, so that a trainer that is held back occupies no
        RPC thread. May be called by all trainers at once (locked).
        """
        answer = torch.futures.Future()
        with self.lock:
            self.scoreboard.batch_of(trainer)  # refuses who was lost
            if trainer in self.waiting:
                raise RuntimeError(f"trainer_{trainer} pushed a gradient before its last push was answered")
            self.held[trainer] = gradient_R.to(self.device), images
            self.waiting[trainer] = answer, version
            self.clock[trainer] += 1
            self.collected[trainer] = version, images, batches
            self.apply_what_is_complete()
            answers = self.answers_due()
        complete(answers)
        return answer

    def get_scoreboard(self):
        """Return an RRef to the job's Scoreboard.  Reads only: needs no lock."""
        return rpc.RRef(self.scoreboard)

    def apply_what_is_complete(self):
        """Make an update of the pushes that are collected, if all are here that belong to it.  Under the lock."""
        needed = len(self.clock) if self.sync else 1
        if not self.collected or len(self.collected) < needed:
            return
        pushes, self.collected = sorted(self.collected.items()), {}  # sums in one order, whoever came first
        gradients = [(trainer, self.version - read, *work) for trainer, (read, *work) in pushes]
        checkpoint_due = self.scoreboard.count_update(gradients)
        self.append(Order([trainer for trainer, _ in pushes], self.lr, capture=checkpoint_due))
        if checkpoint_due:
            self.scoreboard.save_soon(functools.partial(self.gather, self.version))

    def answers_due(self):
        """Return (Future, its answer) of each push that need not wait any longer.  Under the lock."""
        # The slowest is never held, and nobody waits for whose lot is done: no deadlock.
        self.clock = {trainer: pushes for trainer, pushes in self.clock.items() if self.scoreboard.lots[trainer]}
        slowest = min(self.clock.values(), default=0)
        free = [who for who in self.waiting if self.clock.get(who, 0) - slowest <= self.lead]
        return [(future, self.answer(read)) for future, read in map(self.waiting.pop, free)]

    def answer(self, read):
        """Return (version, weights (R,), (start, Orders since version `read`, for the others)).  Under the lock."""
        start = max(read, self.start)
        return self.version, to_wire(self.weights), (start, self.log[start - self.start :])

    def append(self, order):
        """Carry an Order out here, and let the other servers do so when they hear of it.  Under the lock."""
        self.carry_out(order)
        self.log += [order] if self.num_servers > 1 else []

    def gather(self, version):
        """Return what a checkpoint needs: what all servers captured at `version`.  Not under the lock: see above."""
        with self.lock:
            captured, start, log = [self.captured.pop(version)], self.start, self.log.copy()
        others = [server_rref(index).rpc_async() for index in range(1, self.num_servers)]
        captured += torch.futures.wait_all([other.captured_at(version, start, log) for other in others])
        with self.lock:  # what all servers have carried out need not be told again
            known = max(self.start, start + len(log))
            self.start, self.log = known, self.log[known - self.start :]
        weights_P = torch.cat([weights_R for weights_R, _ in captured])
        velocity_P = torch.cat([velocity_R for _, velocity_R in captured])
        check_finite(weights_P.sum(), "sum of the weights", version)
        return {"model": self.by_name(weights_P), "momentum": velocity_P}

    def by_name(self, weights_P):
        """Return the network's weights by name, as views of these."""
        params = dict(self.model.named_parameters())
        parts = weights_P.split([param.numel() for param in params.values()])
        return {name: part.view_as(params[name]) for name, part in zip(params, parts, strict=True)}

    # ---------------------------------------------------------------------- called by the Scoreboard, in this process

    def start_lots(self, lr):
        """Begin with the lots of batches that the Scoreboard has dealt.  All trainers are waiting."""
        self.share_what_was_restored()
        with self.lock:  # a trainer may be lost at any moment
            self.lr, self.clock = lr, {who: 0 for who in self.scoreboard.living if self.scoreboard.lots[who]}

    def forget(self, trainer):
        """Strike a trainer that is lost off the living: what is here of it and not applied never will be."""
        with self.lock:
            self.scoreboard.living.remove(trainer)
            for books in (self.clock, self.waiting, self.collected, self.held):
                books.pop(trainer, None)
            self.apply_what_is_complete()
            answers = self.answers_due()
        complete(answers)

    def capture(self):
        """Return what a checkpoint needs of all servers, and lay it under the model.  All trainers are waiting."""
        self.share_what_was_restored()
        with self.lock:
            self.append(Order(capture=True))
            version = self.version
        state = self.gather(version)
        self.model.load_state_dict(state["model"])
        return state

    def restore(self, state):
        """Go on from what capture() returned, with any number of servers.  Before RPC begins."""
        self.model.load_state_dict(state["model"])
        self.restored = parameters_to_vector(self.model.parameters()).detach().cpu(), state["momentum"]
        self.start_from(*self.restored_part(0))

    def share_what_was_restored(self):
        """Send each other server its range of it: once, and before anything is computed from it."""
        if self.restored:
            others = range(1, self.num_servers)
            sent = [server_rref(index).rpc_async().start_from(*self.restored_part(index)) for index in others]
            torch.futures.wait_all(sent)
            self.restored = None

    def restored_part(self, index):
        """Return (weights (R,), momentum (R,) or (0,)) of a server's range."""
        weights_P, velocity_P = self.restored
        part = range_of(index, self.num_servers, len(weights_P))
        return weights_P[part], velocity_P[part]


def complete(answers):
    """Answer these pushes: (Future, answer) of each.  Not under the lock."""
    for future, answer in answers:
        future.set_result(answer)
