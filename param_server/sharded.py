"""Mode `sharded`: trainers compute with copies of the network, whose weights are shared out among several servers.

In `replica` all weights pass through one server, so its network connection is the first that is full. Here there are
several servers (--num_servers), and each has a range of the weights. A server gets its range of each gradient, and does
not know of the others. So each may serve two trainers in a different order, and the weights that a trainer gets may
contain a gradient in one range and not yet in another.
Read it in the order of a step: Trainer.train (in a trainer), then Shard.push (in each server). Rank 0 starts the
trainers' loops by one long call to each: ParameterServer.train.
Source: Li et al., as for replica.py. (There, several servers keep each range, so that one of them may die.)

Shapes: P weights in the whole network, R in the range of one server. tensor_split makes ranges whose lengths differ by
at most one weight. All tensors travel on the CPU, because RPC's CUDA support is beta.
"""

import threading

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import optim
from torch.futures import wait_all
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from data import Batches, load_digits
from glue.report import check_finite
from glue.seeds import seed_for
from lead import Counts, print_loss, run_loops
from net import Net


class Trainer:  # in a trainer, on the RPC thread that serves the call of `train`
    """Trains a copy of the network."""

    def __init__(self, shards, plan, device):
        self.rank = rpc.get_worker_info().id
        self.seed, self.device = plan.seed, torch.device(device)
        digits = load_digits(plan.dataset, plan.data_dir, plan.seed, train=True)
        self.batches = Batches(*digits, plan.batch_size, plan.seed, self.device)
        self.net = Net().to(self.device).train(not plan.no_dropout)
        self.shards = shards  # RRefs
        self.versions = []  # of the weights in `net`, for each shard
        self.steps = 0

    def count_images(self):
        return self.batches.size

    def train(self, epoch, batches, log_interval):
        """Train with these batches; return [(batch, loss)] of those whose loss was printed."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has a current device of its own
        losses = []
        self.load([shard.rpc_async().pull() for shard in self.shards])
        for batch in batches:
            with torch.profiler.record_function("step"):
                data, target = self.batches.get(epoch, batch)
                # With a seed for each batch, dropout is the same in every run, whoever computes it.
                torch.manual_seed(seed_for(self.seed, "dropout", epoch, batch))
                loss = F.nll_loss(self.net(data), target)
                gradients = torch.autograd.grad(loss, list(self.net.parameters()))
                gradient_P = torch.cat([gradient.reshape(-1) for gradient in gradients]).cpu()
                futures = []
                for shard, gradient_R, version in self.ranges(gradient_P):
                    about = (batch, self.rank, version, len(target))
                    futures.append(shard.rpc_async().push(gradient_R, about))
                self.load(futures)  # which waits until all servers have answered
            if self.steps % log_interval == 0:
                losses.append((batch, loss.item()))
                print_loss(self.rank, batch, loss.item())
            self.steps += 1
        return losses

    def ranges(self, gradient_P):
        """Return (shard, its range of the gradient, the version of its weights) for all shards."""
        return zip(self.shards, gradient_P.tensor_split(len(self.shards)), self.versions, strict=True)

    def load(self, futures):
        """Wait for the answers of all servers, each (version, weights (R,)), and load them into the network."""
        self.versions, weights = zip(*wait_all(futures), strict=True)
        vector_to_parameters(torch.cat(weights).to(self.device), self.net.parameters())


class Shard:  # in every server, on RPC threads
    """A range of the weights, and the SGD that updates it with each push."""

    def __init__(self, device, momentum):
        self.device, self.momentum = torch.device(device), momentum
        self.counts = Counts()
        self.lock = threading.RLock()  # guards all that changes

    # Trainers call the next two methods, several at once.

    def pull(self):
        """Return (version, weights (R,))."""
        with self.lock:
            return self.counts.updates, self.weights_R.to("cpu", copy=True)

    def push(self, gradient_R, about):
        """Update the weights with a gradient; return (version, weights (R,)). `about`: see Counts.add_update."""
        with self.lock:
            check_finite(gradient_R.sum(), "sum of a range of a gradient", self.counts.updates + 1)
            self.weights_R.grad = gradient_R.to(self.device)
            self.optimizer.step()
            self.counts.add_update(about)
            return self.pull()

    # Rank 0 calls the other two, while no trainer computes.

    def begin(self, weights_R, momentum_R, lr, progress):
        """Get the state with which training begins: the weights, SGD's momentum, the learning rate, the counts."""
        self.weights_R = weights_R.to(self.device, copy=True)  # a view would keep all P weights in memory
        self.optimizer = optim.SGD([self.weights_R], lr=lr, momentum=self.momentum)
        self.optimizer.state[self.weights_R]["momentum_buffer"] = momentum_R.to(self.device, copy=True)
        self.counts.load_state_dict(progress)

    def end(self):
        """Return (weights (R,), momentum (R,))."""
        return self.weights_R.cpu(), self.optimizer.state[self.weights_R]["momentum_buffer"].cpu()


class ParameterServer:  # in server1, on its main thread
    """Leads the servers, of which one is in this process too, and the trainers."""

    TRAINER_THREADS = 16  # RPC threads of a trainer: torch's default

    def __init__(self, plan, devices):
        """`plan`: the flags on which all ranks agree. `devices`: of the ranks."""
        torch.manual_seed(seed_for(plan.seed, "net"))
        self.model = Net().to(devices[0])
        # All weights in one tensor, of which the model's parameters become views. This, and the momentum of its SGD,
        # is up to date while no trainer computes.
        self.weights_P = parameters_to_vector(self.model.parameters()).detach()
        vector_to_parameters(self.weights_P, self.model.parameters())
        self.optimizer = optim.SGD([self.weights_P], lr=plan.lr, momentum=plan.momentum)
        self.optimizer.state[self.weights_P]["momentum_buffer"] = torch.zeros_like(self.weights_P)
        first = Shard(devices[0], plan.momentum)
        self.counts = first.counts  # each server makes as many updates
        # remote() does not wait: all trainers read their images at the same time. timeout=0: no time limit.
        others = range(1, plan.num_servers)
        shards = [rpc.remote(rank, Shard, args=(devices[rank], plan.momentum), timeout=0) for rank in others]
        self.shards = [rpc.RRef(first), *shards]
        ranks = range(plan.num_servers, plan.world_size)
        self.trainers = {
            rank: rpc.remote(rank, Trainer, args=(self.shards, plan, devices[rank]), timeout=0) for rank in ranks
        }

    def train(self, epoch, batches, report, log_interval):
        """Deal these batches, which are given by their numbers, to the trainers, and let them train."""
        state = self.optimizer.state[self.weights_P]
        weights = self.weights_P.cpu().tensor_split(len(self.shards))
        momenta = state["momentum_buffer"].cpu().tensor_split(len(self.shards))
        how = self.optimizer.param_groups[0]["lr"], self.counts.state_dict()
        wait_all([rref.rpc_async().begin(*its, *how) for rref, *its in zip(self.shards, weights, momenta, strict=True)])
        shares = [batches[place :: len(self.trainers)] for place in range(len(self.trainers))]
        run_loops(self.trainers.values(), epoch, shares, report, log_interval, self.counts)
        weights, momenta = zip(*wait_all([shard.rpc_async().end() for shard in self.shards]), strict=True)
        self.weights_P.copy_(torch.cat(weights))
        state["momentum_buffer"].copy_(torch.cat(momenta))
