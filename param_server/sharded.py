"""Mode `sharded`: trainers compute with copies of the network, whose weights are shared out among several servers.

In `replica` all weights pass through one server, so its network connection is the first that is full. Here there are
several servers (--num_servers), and each has a range of the weights. A server gets its range of each gradient, and does
not know of the others. So each may serve two trainers in a different order, and the weights that a trainer gets may
contain a gradient in one range and not yet in another.
Read replica.py first, then ParameterServer.run_batches (in rank 0), which starts the trainers' loops by one long call
to each (run_loops in remote.py), Trainer.run_training_loop (in a trainer), and Shard.push (in each server).
Source: Li et al., as for replica.py. (There, several servers keep each range, so that one of them may die.)

Shapes: P weights in the whole network, R in the range of one server. tensor_split makes ranges whose lengths differ by
at most one weight. All tensors travel on the CPU, because RPC's CUDA support is beta.
"""

import threading

from glue.open_calls import OpenCalls
from glue.training import check_finite

import torch
import torch.distributed.rpc as rpc
from torch import optim
from torch.futures import wait_all

import replica
from counts import Counts, Origin
from remote import print_loss, run_loops


class ParameterServer:  # in server1, on its main thread
    """Leads the servers, of which one is in this process too, and the trainers.

    While the trainers train, the weights are in the Shards.
    """

    TRAINER_THREADS = 16  # RPC threads of a trainer, torch's default. run_training_loop occupies one of them

    def __init__(self, plan, devices, folders, bar):
        self.counts = Counts(bar)
        self.calls = OpenCalls()  # to the trainers
        torch.set_num_threads(1)  # as in replica, for the trainers' sake
        self.model, self.weights_P, self.optimizer = replica.make_model(plan, devices[0])
        # Every shard counts the same gradients. main.py reads the counts of this process's shard.
        self.shards = [rpc.RRef(Shard(devices[0], plan.momentum, self.counts))]
        for rank in range(1, plan.num_servers):
            self.shards.append(rpc.remote(rank, Shard, args=(devices[rank], plan.momentum, Counts()), timeout=0))
        self.trainers = {
            rank: rpc.remote(rank, Trainer, args=(self.shards, plan, folders[rank], devices[rank]), timeout=0)
            for rank in range(plan.num_servers, plan.world_size)
        }

    def run_batches(self, epoch, batches, report):
        """Let the trainers train with these batches, which are given by their numbers."""
        # The weights and the momentum go out to the shards, whose optimizers make the steps, and come back at the end:
        # main.py evaluates and saves the model and the optimizer that are here, and loads checkpoints into them.
        momentum_P = momentum_of(self.weights_P, self.optimizer)
        ranges = [tensor_P.cpu().tensor_split(len(self.shards)) for tensor_P in (self.weights_P, momentum_P)]
        lr = self.optimizer.param_groups[0]["lr"]
        for shard, weights_R, momentum_R in zip(self.shards, *ranges, strict=True):
            shard.rpc_sync().set_state(weights_R, momentum_R, lr, self.counts.updates)
        run_loops(self, epoch, batches, report)
        weights, momenta = zip(*(shard.rpc_sync().get_state() for shard in self.shards), strict=True)
        self.weights_P.copy_(torch.cat(weights))
        momentum_P.copy_(torch.cat(momenta))


class Trainer(replica.Trainer):  # in a trainer, on the RPC thread that serves run_training_loop
    """Trains a copy of the network, whose gradients are computed as in `replica`."""

    def __init__(self, shards, plan, data_dir, device):
        super().__init__(plan, data_dir, device)
        self.log_interval = plan.log_interval
        self.rank = rpc.get_worker_info().id
        self.shards = shards  # RRefs
        self.steps = 0

    def run_training_loop(self, epoch, batches):
        """Train with these batches; return [(batch, loss)] of those whose loss was printed."""
        losses = []
        answers = [shard.rpc_async().pull() for shard in self.shards]  # later those of push, with the next weights
        for batch in batches:
            with torch.profiler.record_function("step"):
                versions, weights = zip(*wait_all(answers), strict=True)  # of each server
                gradient_P, images, loss = self.gradient(torch.cat(weights), epoch, batch)
                # Views: RPC copies those of at most half of the gradient. With a larger one it would send all P.
                ranges = gradient_P.tensor_split(len(self.shards))
                answers = [
                    shard.rpc_async().push(gradient_R, Origin(batch, self.rank, version, images))
                    for shard, gradient_R, version in zip(self.shards, ranges, versions, strict=True)
                ]
            if self.steps % self.log_interval == 0:
                losses.append((batch, loss))
                print_loss(self.rank, batch, loss)
            self.steps += 1
        wait_all(answers)  # the last gradient is in the weights
        return losses


class Shard:  # in every server, on RPC threads
    """A range of the weights, and the SGD that updates it with each push."""

    def __init__(self, device, momentum, counts):
        self.device, self.momentum = torch.device(device), momentum
        self.counts = counts
        self.lock = threading.RLock()  # guards all that changes; push calls pull while it holds it
        # set_state makes the weights and the optimizer.

    # Trainers call the next two methods, several at once.

    def pull(self):
        """Return (version, weights (R,))."""
        with self.lock:
            return self.counts.updates, self.weights_R.to("cpu", copy=True)

    def push(self, gradient_R, origin):
        """Update the weights with a range of a gradient; return (version, weights (R,))."""
        with self.lock:
            check_finite(gradient_R.sum(), "sum of a range of a gradient", self.counts.updates + 1)
            self.weights_R.grad = gradient_R.to(self.device)
            self.optimizer.step()
            self.counts.add_update(origin)
            return self.pull()

    # Rank 0 calls the other two, while no trainer computes.

    def set_state(self, weights_R, momentum_R, lr, updates):
        """Begin with these weights, SGD's momentum, the learning rate, and the number of updates so far."""
        self.weights_R = weights_R.to(self.device, copy=True)  # a view would keep all P weights in memory
        self.optimizer = optim.SGD([self.weights_R], lr=lr, momentum=self.momentum)
        momentum_of(self.weights_R, self.optimizer).copy_(momentum_R)
        self.counts.updates = updates  # in server1 this changes nothing: its Counts are those of rank 0

    def get_state(self):
        """Return (weights (R,), momentum (R,))."""
        return self.weights_R.cpu(), momentum_of(self.weights_R, self.optimizer).cpu()


def momentum_of(weights, optimizer):
    """Return SGD's momentum of these weights, a tensor of their shape that each step changes in place.

    Before the first step it is made, as zeros, with which SGD's first step is the same.
    """
    return optimizer.state[weights].setdefault("momentum_buffer", torch.zeros_like(weights))
