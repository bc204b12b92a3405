"""Mode `replica` with several servers (--num_servers): each server has a range of the weights.

This file has both sides.  FirstServer runs in the process `parameter_server`.  It decides when a push is applied and
answered, as a single server does.  RangeServer runs in `parameter_server_1`, `parameter_server_2`, ...  RangeReplica
runs in the trainers.

A trainer cuts each push into parts, one for each server, and it may die when only some parts have arrived.  So each
RangeServer *holds* its part, and does not apply it.  The first server gets its part last, applies it when --consistency
allows this, and records the update in a log.  Its answer to a push contains the newest entries of the log.  The trainer
sends these entries to the other servers, together with its request for their weights, and they apply the same updates.
So a push is applied by all servers or by none, and all servers apply the updates in the same order.

Shapes: P weights in the whole network, R of them in one server's range.
"""

import functools
import threading
from dataclasses import dataclass, replace

import torch
import torch.distributed.rpc as rpc
from torch.nn.utils import parameters_to_vector

from digits_net import Net
from replica_server import FlatSGD, ReplicaServer
from replica_trainer import Replica, train_replica
from rpc_names import server_name

range_server = None  # the one FirstServer or RangeServer of this process


def make_range_server(rank, args, device):
    """Make this process's server from its own command line, and return it.  Called before init_rpc."""
    global range_server
    range_server = FirstServer(args, device) if rank == 0 else RangeServer(rank, args, device)
    return range_server


def get_range_server():
    """Return this process's server.  It only reads, so it needs no lock."""
    return range_server


@functools.cache
def server_rref(index):
    """Return an RRef to the server with this number (from 0).  May be called in any process."""
    return rpc.remote(server_name(index), get_range_server)


def range_of(server, num_servers, size):
    """Return the slice of (P,) that a server (from 0) has.  The ranges' lengths differ by one weight at most."""
    return slice(size * server // num_servers, size * (server + 1) // num_servers)


@dataclass
class Update:
    """One entry of the log: whose pushes the first server applied in this update, and with which learning rate."""

    trainers: list
    lr: float
    capture: bool = False  # whether to keep the resulting weights for a checkpoint


# ------------------------------------------------------------------------------------------------------ the servers


class RangeServer:
    """Each server but the first.  It repeats the first server's updates on its own range of the weights."""

    def __init__(self, index, args, device):
        self.device = device
        torch.manual_seed(args.seed)
        weights_P = parameters_to_vector(Net().parameters()).detach()
        weights_R = weights_P[range_of(index, args.num_servers, len(weights_P))]
        self.sgd = FlatSGD(weights_R.to(device, copy=True), args.momentum)
        self.lock = threading.Lock()  # held while `sgd`, or the variables below, are read or changed
        self.version = 0  # of the weights: the number of updates so far
        self.held = {}  # trainer -> its Push (R,) that was received, but not applied
        self.captured = {}  # version -> (weights (R,), momentum (R,) or (0,)) after an Update with `capture`

    def start_from(self, version, weights_R, velocity_R):
        """Set weights and momentum to those of a checkpoint.  Called by the first server, before any push (locked)."""
        with self.lock:
            self.version = version
            self.sgd.load(weights_R, velocity_R)

    def hold(self, push):
        """Keep this server's part of a push until the log has it.  May be called by all trainers at once (locked)."""
        with self.lock:
            if push.trainer in self.held:
                raise RuntimeError(f"trainer_{push.trainer} sent a part of a push before its last push was applied")
            push.gradient = push.gradient.to(self.device)
            self.held[push.trainer] = push

    def catch_up(self, start, log):
        """Apply the updates of the log that are new to this server.  Return the weights (R,) after them.

        `start`: the version before the log's first entry.  May be called by all trainers at once (locked).
        """
        with self.lock:
            self.repeat(start, log)
            return self.sgd.weights.cpu()

    def captured_at(self, version, start, log):
        """Catch up.  Return what was captured at `version`.  Called by the first server for a checkpoint (locked)."""
        with self.lock:
            self.repeat(start, log)
            return self.captured.pop(version)

    def state_of_now(self, start, log):
        """Catch up.  Return (weights, momentum).  Called by the first server, while all trainers wait (locked)."""
        with self.lock:
            self.repeat(start, log)
            return self.sgd.state()

    def repeat(self, start, log):
        """Apply the Updates in `log` (the first one follows version `start`) that are new.  Called under the lock."""
        assert start <= self.version, "the log that a trainer brought begins after this server's version"
        for update in log[self.version - start :]:
            pushes = [self.held.pop(trainer) for trainer in update.trainers]
            self.sgd.step(pushes, update.lr)
            self.version += 1
            if update.capture:
                self.captured[self.version] = self.sgd.state()


class FirstServer(ReplicaServer):
    """The first server: a ReplicaServer of one range of the weights, which logs its updates for the others."""

    def __init__(self, args, device):
        super().__init__(args, device)
        self.num_servers = args.num_servers
        self.sgd = FlatSGD(self.part_of(self.sgd.weights, 0).clone(), args.momentum)
        self.log = []  # the newest Updates: those after version `log_start`
        self.log_start = 0
        # (version, weights (P,), momentum (P,) or (0,)) of a checkpoint, until they were sent to the other servers.
        self.unshared = None

    def part_of(self, tensor_P, server):
        """Return a server's part of a tensor (P,), or of an empty one (0,)."""
        return tensor_P[range_of(server, self.num_servers, len(tensor_P))]

    def take_in(self, push):
        """Record a push, and drop the log entries that the push's trainer has brought to all other servers."""
        super().take_in(push)
        known = max(push.version, self.log_start)
        self.log = self.log[known - self.log_start :]
        self.log_start = known

    def apply(self, pushes):
        """Make one optimizer step with these pushes, and log it, so that the other servers will do the same."""
        super().apply(pushes)
        self.log.append(Update([push.trainer for push in pushes], self.lr))

    def answer(self):
        """Return (version, weights (R,), the arguments for RangeServer.catch_up)."""
        version, weights_R = super().answer()
        return version, weights_R, (self.log_start, self.log.copy())

    def start_assignments(self, lr):
        """Prepare for new assignments: see ReplicaServer.  All trainers are waiting for this."""
        self.share_what_was_restored()
        super().start_assignments(lr)

    def save_soon(self):
        """Let the Scoreboard's writer thread collect all servers' weights after the newest Update, and save them."""
        self.log[-1].capture = True  # this holds the lock, so no trainer has this entry yet
        collect = functools.partial(
            self.collect_captured, self.scoreboard.updates, self.sgd.state(), self.log_start, self.log.copy()
        )
        self.scoreboard.save_soon(collect)

    def collect_captured(self, version, state, start, log):
        """Return the content of a checkpoint.  `state`: this server's part.  Not under the lock: it waits for RPCs."""
        others = range(1, self.num_servers)
        parts = [server_rref(index).rpc_async().captured_at(version, start, log) for index in others]
        return self.join([state, *torch.futures.wait_all(parts)])

    def capture(self):
        """Return the content of a checkpoint, and load its weights into the model.  All trainers are waiting."""
        self.share_what_was_restored()
        with self.lock:
            state = self.sgd.state()
            _, _, log = self.answer()
        parts = [server_rref(index).rpc_async().state_of_now(*log) for index in range(1, self.num_servers)]
        joined = self.join([state, *torch.futures.wait_all(parts)])
        self.model.load_state_dict(joined["model"])
        return joined

    def join(self, parts):
        """Return the content of a checkpoint from each server's (weights (R,), momentum (R,) or (0,))."""
        weights_P = torch.cat([weights_R for weights_R, _ in parts])
        velocity_P = torch.cat([velocity_R for _, velocity_R in parts])
        return self.checkpoint_of(weights_P, velocity_P)

    def restore(self, state):
        """Continue from what capture() returned, with any number of servers.  Called before init_rpc."""
        self.model.load_state_dict(state["model"])
        weights_P = parameters_to_vector(self.model.parameters()).detach().cpu()
        self.sgd.load(self.part_of(weights_P, 0), self.part_of(state["momentum"], 0))
        self.log_start = self.scoreboard.updates
        self.unshared = self.log_start, weights_P, state["momentum"]

    def share_what_was_restored(self):
        """Send each other server its part of the restored checkpoint.  This happens once, before the first update."""
        if self.unshared is None:
            return
        version, weights_P, velocity_P = self.unshared
        sent = []
        for index in range(1, self.num_servers):
            weights_R = self.part_of(weights_P, index)
            velocity_R = self.part_of(velocity_P, index)
            sent.append(server_rref(index).rpc_async().start_from(version, weights_R, velocity_R))
        torch.futures.wait_all(sent)
        self.unshared = None


# ------------------------------------------------------------------------------------------------------ the trainers


class RangeReplica(Replica):
    """A trainer's copy of the network, and its connections to all servers."""

    def __init__(self, rank, server_rrefs, device):
        first, *self.other_rrefs = server_rrefs
        super().__init__(rank, first, device)
        size = sum(param.numel() for param in self.net.parameters())
        self.ranges = [range_of(index, len(server_rrefs), size) for index in range(len(server_rrefs))]

    def send(self, push):
        """Send each server its part of a push.  The first server gets its part last, after all others have theirs."""
        first_range, *other_ranges = self.ranges
        held = []
        for rref, part in zip(self.other_rrefs, other_ranges, strict=True):
            held.append(rref.rpc_async().hold(replace(push, gradient=push.gradient[part])))
        torch.futures.wait_all(held)
        super().send(replace(push, gradient=push.gradient[first_range]))

    def take(self, answer):
        """Send the log of an answer to the other servers, and load all servers' weights into the network."""
        version, weights_R, log = answer
        others_R = torch.futures.wait_all([rref.rpc_async().catch_up(*log) for rref in self.other_rrefs])
        super().take((version, torch.cat([weights_R, *others_R])))


def run_range_loop(rank, args, batches, device):
    """Train with several servers, until the Scoreboard has no more assignments."""
    server_rrefs = [server_rref(index) for index in range(args.num_servers)]
    train_replica(RangeReplica(rank, server_rrefs, device), args, batches)
