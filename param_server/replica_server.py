"""Mode `replica`, the server's side: a range of the weights, which trainers push gradients to and pull from.

Runs in the processes `parameter_server`, `parameter_server_1`, ... (--num_servers), called by the trainers over RPC.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, the paper that the
tutorial's introduction describes.

One rule for whatever runs here: no RPC is waited for while the lock is held.  Answers arrive on the same threads that
serve calls; if the other calls waited for the lock on all of these, the answer that lets go of it could never come.

Shapes: P weights in the whole network, R of them in this server's range.
"""

import functools
import math
import threading

import torch
import torch.distributed.rpc as rpc

from digits_net import Net
from flat_weights import WeightRange, flatten_parameters, named_views, range_of
from rpc_names import server_name, trainers
from scoreboard import Scoreboard

range_server = None  # the one RangeServer of this process


def make_range_server(rank, args, device):
    """Make this process's RangeServer, from its own command line, and return it.  Before RPC begins."""
    global range_server
    range_server = RangeServer(rank, args, device)
    return range_server


def get_range_server():
    """Return this process's RangeServer.  May be called by all trainers at once: it only reads."""
    return range_server


class RangeServer:
    """A range of the weights, and who waits for whom.  The first server also keeps the job's Scoreboard.

    --consistency decides when a push is applied and when it is answered:

    async    applied at once, answered at once
    bounded  applied at once, answered when the trainer is at most --max_staleness pushes ahead of the slowest
    sync     applied when one of each trainer is here, as their average; answered then
    """

    def __init__(self, index, args, device):
        self.num_servers, self.sync_every, self.device = args.num_servers, args.sync_every, device
        torch.manual_seed(args.seed)
        self.net = Net(dropout=not args.no_dropout).to(device)  # the start; on the first server also to evaluate
        weights_P = flatten_parameters(self.net)
        part = range_of(index, args.num_servers, len(weights_P))
        self.range = WeightRange(part, weights_P, args.lr, args.momentum)
        self.lock = threading.Lock()  # held while the range, or what follows, is read or changed
        self.clock = dict.fromkeys(trainers(args), 0)  # trainer -> its pushes in this epoch
        self.waiting = {}  # trainer -> Future of its unanswered push
        self.collected = []  # gradients that are here and not applied
        self.asked = []  # (version, Future) of get_range calls that wait for that version
        self.lead = {"async": math.inf, "bounded": args.max_staleness, "sync": 0}[args.consistency]
        self.needed = len(self.clock) if args.consistency == "sync" else 1  # gradients for an update
        self.restored = None  # a checkpoint's (weights (P,), momentum (P,)), until all servers have taken it up
        self.scoreboard = Scoreboard(args, self) if index == 0 else None

    # ---------------------------------------------------------------------- called by the trainers, over RPC

    def pull(self):
        """Return (version, learning rate, weights (R,)).  May be called by all trainers at once (locked)."""
        with self.lock:
            return self.range.answer()

    @rpc.functions.async_execution
    def push(self, trainer, version, gradient_R, images, batches):
        """Apply a gradient (R,) computed on weights of `version`; answer like pull(), with the weights after it.

        The caller gets the answer when somebody completes this Future, so that a trainer that is held back occupies no
        RPC thread. May be called by all trainers at once (locked).
        """
        books = None
        with self.lock:
            self.clock[trainer] += 1
            future = self.waiting[trainer] = torch.futures.Future()
            self.collected.append((trainer, version, gradient_R.to(self.device), images, batches))
            if len(self.collected) == self.needed:
                pushes = sorted(self.collected, key=lambda push: push[0])  # sums in one order, whoever came first
                self.collected, late = [], self.range.update(pushes)
                books = self.scoreboard.count_update(late) if self.scoreboard else None
            # Every trainer makes the same number of pushes per epoch, and the slowest is never held: no deadlock.
            slowest = min(self.clock.values())
            free = [name for name in self.waiting if self.clock[name] - slowest <= self.lead]
            answered = [self.waiting.pop(name) for name in free]
            answer = self.range.answer() if answered else None
            asked = [each for version, each in self.asked if version <= self.range.version]
            self.asked = [(version, each) for version, each in self.asked if version > self.range.version]
            captured = self.range.capture() if books or asked else None
        # Outside the lock: completing a Future sends its answer from this very thread, and saving waits for RPCs.
        for each in asked:
            each.set_result(captured)
        if books:  # a checkpoint is due. In `sync` all trainers wait for it, so that no server can be an update further
            self.scoreboard.save(books, self.capture(captured))
        for each in answered:
            each.set_result(answer)
        return future

    def get_scoreboard(self):
        """Return an RRef to the job's Scoreboard (first server).  Reads only: needs no lock."""
        return rpc.RRef(self.scoreboard)

    # ---------------------------------------------------------------------- called by the Scoreboard, rank 0

    def start_epoch(self, lr):
        """Set every server's learning rate and clocks.  All trainers are waiting."""
        pushes = {t: math.ceil(done / self.sync_every) for t, done in self.scoreboard.batches_done.items()}
        state, self.restored = self.restored, None
        self.begin_epoch(lr, pushes, state)
        torch.futures.wait_all([rref.rpc_async().begin_epoch(lr, pushes, state) for rref in self.others])

    def net_to_evaluate(self):
        """Return the network with the weights of all servers.  All trainers are waiting."""
        self.net.load_state_dict(self.capture()["model"])
        return self.net

    def capture(self, captured=None):
        """Return what a checkpoint needs of all servers, on the CPU: this range as captured, else as it is now.

        The others are captured at the same version: exactly in `sync`, and while all trainers are waiting. Else they
        may be some updates further by then, as they may be for a trainer.
        """
        captured = captured or self.range.capture()
        futures = [rref.rpc_async().get_range(captured[0]) for rref in self.others]
        _, weights, momentum = zip(captured, *torch.futures.wait_all(futures), strict=True)
        return {"model": named_views(torch.cat(weights), self.net), "momentum": torch.cat(momentum)}

    def restore(self, state):
        """Go on from what capture() returned, with any number of servers.  They take it up in start_epoch."""
        self.net.load_state_dict(state["model"])
        self.restored = torch.cat([weight.reshape(-1) for weight in state["model"].values()]), state["momentum"]

    @functools.cached_property
    def others(self):
        """RRefs to all servers but this one, the first."""
        return [rpc.remote(server_name(index), get_range_server) for index in range(1, self.num_servers)]

    # ---------------------------------------------------------------------- called by the first server, on each

    def begin_epoch(self, lr, clock, restored):
        """Set learning rate, clocks and, unless None, the `restored` range.  All trainers are waiting: no lock."""
        self.range.optimizer.param_groups[0]["lr"], self.clock = lr, dict(clock)
        if restored:
            self.range.restore(*restored)

    @rpc.functions.async_execution
    def get_range(self, version):
        """Return (version, weights (R,), momentum (R,)) once this range has had `version` updates, as a Future.

        The first server, which asks, has had them: their pushes are on the way here. Locked: trainers may push.
        """
        future = torch.futures.Future()
        with self.lock:
            if self.range.version < version:
                self.asked.append((version, future))
            else:
                future.set_result(self.range.capture())
        return future
