"""Mode `replica`, the server's side: a range of the weights, which trainers push gradients to and pull from.

Runs in the processes `parameter_server`, `parameter_server_1`, ... (--num_servers), called by the trainers over RPC.
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, the paper that the
tutorial's introduction describes.

Shapes: P weights in the whole network, R of them in this server's range.
"""

import contextlib
import math
import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn, optim

from digits_net import Net
from flat_weights import flatten_parameters, range_of
from glue import placement
from glue.placement import to_wire
from remote_server import learning_rate
from rpc_names import trainers, worker_name
from scoreboard import Scoreboard

range_server = None  # the one RangeServer of this process
global_lock = threading.Lock()


def get_range_server(args, index):
    """Return this process's RangeServer, made by the first call.  May be called by all trainers at once (locked)."""
    global range_server
    with global_lock:
        if range_server is None:
            range_server = RangeServer(args, index)
        return range_server


def on_range_server(args, index, method, *method_args):
    """Call RangeServer.`method` in this process, locked: what the first server asks of the others over RPC."""
    server = get_range_server(args, index)
    with server.exclusive():
        return getattr(server, method)(*method_args)


class RangeServer:
    """Weights (R,) and their one optimizer.  The first server also keeps the job's Scoreboard.

    --consistency decides when a push is applied and when it is answered:

    async    applied at once, answered at once
    bounded  applied at once, answered when the trainer is at most --max_staleness pushes ahead of the slowest
    sync     applied when one of each trainer is here, as their average; answered then
    """

    def __init__(self, args, index):
        self.args, self.index = args, index
        self.device = placement.device_of(index, args)
        torch.manual_seed(args.seed)
        self.net = Net(dropout=not args.no_dropout).to(self.device)  # the start; on the first server also to evaluate
        self.all_weights = flatten_parameters(self.net)
        self.range = range_of(index, args.num_servers, len(self.all_weights))
        self.weights = nn.Parameter(self.all_weights[self.range].clone())
        self.optimizer = optim.SGD([self.weights], lr=args.lr, momentum=args.momentum)
        self.lock = threading.Lock()
        self.version = 0  # updates of this range
        self.trainers = trainers(args)
        self.clock = dict.fromkeys(self.trainers, 0)  # trainer -> its pushes in this epoch
        self.waiting = {}  # trainer -> Future of its unanswered push
        self.collected = []  # gradients that are here and not applied
        self.lead = {"async": math.inf, "bounded": args.max_staleness, "sync": 0}[args.consistency]
        self.scoreboard = Scoreboard(args, self) if index == 0 else None

    # ------------------------------------------------------------------------------ called by the trainers, over RPC

    def pull(self):
        """Return (version, learning rate, weights (R,)).  May be called by all trainers at once (locked)."""
        with self.exclusive():
            return self._answer()

    @rpc.functions.async_execution
    def push(self, trainer, version, gradient_R, images, batches):
        """Apply a gradient (R,) computed on weights of `version`; answer like pull(), with the weights after it.

        The answer is a Future: whoever completes it, the caller gets it then. So a trainer that is held back occupies
        no RPC thread. May be called by all trainers at once (locked).
        """
        future = torch.futures.Future(devices=[self.device] if self.device.type == "cuda" else None)
        with self.exclusive():
            self.clock[trainer] += 1
            self.waiting[trainer] = future
            self.collected.append((trainer, version, gradient_R.to(self.device), images, batches))
            if self.args.consistency != "sync" or len(self.collected) == len(self.trainers):
                self._apply(sorted(self.collected, key=lambda item: item[0]))  # sums in one order, whoever came first
                self.collected = []
            # Every trainer makes the same number of pushes per epoch, and the slowest is never held: no deadlock.
            slowest = min(self.clock.values())
            free = [name for name in self.waiting if self.clock[name] - slowest <= self.lead]
            futures = [self.waiting.pop(name) for name in free]
            answer = self._answer() if futures else None
        for each in futures:  # outside the lock: completing a Future sends its answer from this very thread
            each.set_result(answer)
        return future

    def get_scoreboard(self):
        """Return an RRef to the job's Scoreboard (first server).  Reads only: needs no lock."""
        return rpc.RRef(self.scoreboard)

    # ------------------------------------------------------------------------------- called by the Scoreboard, rank 0

    def start_epoch(self, epoch):
        """Set every server's learning rate and clocks.  All trainers are waiting."""
        pushes = {t: math.ceil(done / self.args.sync_every) for t, done in self.scoreboard.batches_done.items()}
        self._on_every_server("set_epoch", epoch, pushes)

    def net_to_evaluate(self):
        self._gather_weights()
        return self.net

    def capture(self):
        """Return what a checkpoint needs of all servers.  Each range is as it was when its server was asked."""
        momentum_P = self._gather_weights()
        return {"model": self.net.state_dict(), "momentum": momentum_P}

    def restore(self, state):
        self.net.load_state_dict(state["model"])
        self._on_every_server("set_range", self.all_weights.cpu(), state["momentum"])

    # -------------------------------------------------------------- called on every server, on behalf of the first one

    def set_epoch(self, epoch, clock):
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.args, epoch)
        self.clock = clock

    def get_range(self):
        """Return CPU copies of (weights (R,), momentum (R,), empty without momentum)."""
        momentum = self.optimizer.state[self.weights].get("momentum_buffer", torch.empty(0))
        return self.weights.detach().cpu().clone(), momentum.cpu().clone()

    def set_range(self, all_weights_P, momentum_P):
        """Take this server's range from the weights (P,) and momentum (P,), empty without momentum, of a checkpoint."""
        with torch.no_grad():
            self.weights.copy_(all_weights_P[self.range])
        if len(momentum_P):
            self.optimizer.state[self.weights]["momentum_buffer"] = momentum_P[self.range].to(self.device, copy=True)

    # ------------------------------------------------------------------------------------------------------- helpers

    def _apply(self, collected):
        """Make one update of the weights out of pushed gradients: of one, or of one of each trainer.  Locked."""
        total = sum(images for *_, images, _ in collected)
        if len(collected) == 1:
            gradient_R = collected[0][2]
        else:  # the mean over all images, as one process on the joined batch has it
            gradient_R = sum(gradient * (images / total) for _, _, gradient, images, _ in collected)
        if not torch.isfinite(gradient_R.sum()):
            raise ValueError(f"the gradient of trainer_{collected[-1][0]} is not finite: try a lower --lr")
        self.weights.grad = gradient_R
        self.optimizer.step()
        self.weights.grad = None
        self.version += 1
        if self.scoreboard:
            before = self.version - 1
            books = [(trainer, before - read, images, batches) for trainer, read, _, images, batches in collected]
            self.scoreboard.count_update(books, num_bytes=2 * self.all_weights.nbytes * len(collected))

    def _answer(self):
        """Return (version, learning rate, weights (R,)).  A copy: RPC reads it when the lock is long free."""
        weights_R = to_wire(self.weights.detach().clone())
        return self.version, self.optimizer.param_groups[0]["lr"], weights_R

    def _on_every_server(self, method, *args):
        """Call a method on this (first) server and on all others; return the answers in order."""
        futures = [
            rpc.rpc_async(worker_name(index, self.args), on_range_server, args=(self.args, index, method, *args))
            for index in range(1, self.args.num_servers)
        ]
        return [getattr(self, method)(*args)] + [future.wait() for future in futures]

    def _gather_weights(self):
        """Copy every server's range into self.net; return the momentum (P,), empty without momentum."""
        ranges = self._on_every_server("get_range")
        self.all_weights.copy_(torch.cat([weights_R for weights_R, _ in ranges]))
        return torch.cat([momentum_R for _, momentum_R in ranges])

    @contextlib.contextmanager
    def exclusive(self):
        """The lock, on a GPU too: work queued there by one thread is finished before another thread's may begin."""
        with self.lock:
            yield
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
