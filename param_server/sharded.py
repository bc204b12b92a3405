"""Mode `sharded`: `replica`, but the weights are shared out among several servers.

In `replica` all trainers send to one server, so its network connection is the first that is full. Here there are
several servers (--num_servers), and each has a range of the weights. A server gets its range of each gradient, and does
not know of the others. So each may serve two trainers in a different order, and the weights that a trainer gets may
contain a push in one range and not yet in another. Read replica.py first. Here is what differs.
Source: Li et al., as for replica.py. (There, several servers keep each range, so that one of them may die.)

Shapes: R weights in the range of one server. tensor_split makes ranges whose lengths differ by at most one weight.
"""

import dataclasses
import threading

import torch
import torch.distributed.rpc as rpc
from torch import optim
from torch.nn.utils import parameters_to_vector

import replica
from glue.report import check_finite
from glue.seeds import seed_for
from net import Net
from ranks import server_name

shard = None  # the Shard of this process, if it is one of the other servers; main.py sets it


def get_shard():
    return shard


def connect(num_servers):
    """Return RRefs to the servers after the first."""
    return [rpc.remote(server_name(rank), get_shard) for rank in range(1, num_servers)]


class Trainer(replica.Trainer):  # in a trainer
    def __init__(self, rank, plan, device):
        super().__init__(rank, plan, device)
        self.shards = connect(plan.num_servers)

    def pull(self):
        own = self.server_rref.rpc_async().pull()
        self.load_ranges(own, [shard.rpc_async().pull() for shard in self.shards])

    def push(self, images):
        """Push to each server its range of the gradient, all at the same time, and get the ranges of the weights."""
        push = self.take_gradient(images)
        first, *others = push.gradient_P.tensor_split(1 + len(self.shards))
        answer = self.server_rref.rpc_async().push(dataclasses.replace(push, gradient_P=first))
        pairs = zip(self.shards, others, strict=True)
        self.load_ranges(answer, [shard.rpc_async().push(gradient_R) for shard, gradient_R in pairs])

    def load_ranges(self, answer, answers):
        """Load the answer of the first server, (version, weights (R,)), and those of the others, weights (R,)."""
        (version, first), *others = torch.futures.wait_all([answer, *answers])
        self.load((version, torch.cat([first, *others])))


class Shard:  # in server2, server3, ..., on RPC threads
    """A range of the weights, and the SGD that updates it with each push."""

    def __init__(self, rank, plan, device):
        torch.manual_seed(seed_for(plan.seed, "net"))
        weights_P = parameters_to_vector(Net().parameters()).detach()
        # A copy, because a view would keep all P weights in memory.
        self.weights_R = weights_P.tensor_split(plan.num_servers)[rank].to(device, copy=True)
        self.optimizer = optim.SGD([self.weights_R], lr=plan.lr, momentum=plan.momentum)
        self.lock = threading.RLock()
        self.updates = 0  # since this process began

    # Trainers call the next two methods, several at once.

    def pull(self):
        """Return the weights (R,)."""
        with self.lock:
            return self.weights_R.to("cpu", copy=True)

    def push(self, gradient_R):
        """Update the weights with a gradient; return them."""
        with self.lock:
            self.updates += 1
            check_finite(gradient_R.sum(), "sum of a range of a gradient", self.updates)
            self.weights_R.grad = gradient_R.to(self.weights_R.device)
            self.optimizer.step()
            return self.pull()

    # The ParameterServer calls the rest, while all trainers wait.

    def set_learning_rate(self, lr):
        self.optimizer.param_groups[0]["lr"] = lr

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, weights_R, optimizer, momentum):
        self.weights_R.copy_(weights_R)
        self.optimizer.load_state_dict(optimizer)
        self.optimizer.param_groups[0]["momentum"] = momentum


class ParameterServer(replica.ParameterServer):  # in server1
    """The first range of the weights. Its updates count for all servers."""

    def __init__(self, plan, device):
        super().__init__(plan, device)
        # These are views, so the model still has all weights: the first range up to date, the others after gather().
        self.weights_P, *self.other_ranges = self.weights_P.tensor_split(plan.num_servers)
        self.optimizer = optim.SGD([self.weights_P], lr=plan.lr, momentum=plan.momentum)
        self.shards = []

    def lead(self, evaluations, test_digits):
        self.shards = connect(self.plan.num_servers)
        super().lead(evaluations, test_digits)

    def set_learning_rate(self, lr):
        super().set_learning_rate(lr)
        torch.futures.wait_all([shard.rpc_async().set_learning_rate(lr) for shard in self.shards])

    def evaluate(self, images, labels):
        self.gather()
        super().evaluate(images, labels)

    def gather(self):
        """Copy the other servers' ranges into the model, which is evaluated and saved here."""
        for weights_R, shard in zip(self.other_ranges, self.shards, strict=True):
            weights_R.copy_(shard.rpc_sync().pull())

    def state_dict(self):
        return super().state_dict() | {"shards": [shard.rpc_sync().state_dict() for shard in self.shards]}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for weights_R, shard, optimizer in zip(self.other_ranges, self.shards, state["shards"], strict=True):
            shard.rpc_sync().load_state_dict(weights_R.cpu(), optimizer, self.plan.momentum)
