"""Mode `replica`, the trainer's side: compute on a copy of the network, push gradients, take fresh weights.

Runs in each trainer process.  What crosses the wire is the weights' size, not the batch's: compare mode `remote`,
where every batch and prediction crosses it, and all computing is the server's.

Shapes: P weights in the whole network, R in one server's range; B images in a batch.
"""

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F

from digits_net import Net
from flat_weights import flatten_gradients, flatten_parameters, range_of
from glue.placement import to_wire
from glue.seeds import seed_for
from mnist_data import Shard, load_digits
from replica_server import get_range_server
from rpc_names import trainers, worker_name


class Replica:
    """A trainer's copy of the network, and its connection to the servers of its weights."""

    def __init__(self, rank, args, device):
        self.rank, self.args = rank, args
        self.net = Net(dropout=not args.no_dropout).to(device)
        self.weights, self.gradient = flatten_parameters(self.net), flatten_gradients(self.net)
        servers = range(args.num_servers)
        self.server_rrefs = [rpc.remote(worker_name(s, args), get_range_server, args=(args, s)) for s in servers]
        self.ranges = [range_of(s, args.num_servers, len(self.weights)) for s in servers]
        self.answers = []  # of each server: (version, learning rate, weights (R,))

    def pull(self):
        """Take the current weights."""
        self._receive([rref.rpc_async().pull() for rref in self.server_rrefs])

    def push(self, images, batches):
        """Send the gradient of this many images in this many batches, and take the weights that come back for it.

        One call to each server, all at once: as many messages per step as there are servers.
        """
        futures = []
        for rref, part, (version, _, _) in zip(self.server_rrefs, self.ranges, self.answers, strict=True):
            gradient_R = to_wire(self.gradient[part])
            # timeout=0: no limit. The server may hold the answer back until slower trainers have caught up.
            futures.append(rref.rpc_async(timeout=0).push(self.rank, version, gradient_R, images, batches))
        self._receive(futures)
        self.gradient.zero_()  # only now: until the answer came, RPC may still have been reading it

    def step_locally(self):
        """Between two pushes (--sync_every): go on from here with the gradients of all batches since the last one.

        For plain SGD these are the same weights that the server will have when no other trainer pushes meanwhile.
        """
        for part, (_, lr, weights_R) in zip(self.ranges, self.answers, strict=True):
            torch.sub(weights_R.to(self.weights.device), self.gradient[part], alpha=lr, out=self.weights[part])

    def _receive(self, futures):
        self.answers = torch.futures.wait_all(futures)
        for part, (_, _, weights_R) in zip(self.ranges, self.answers, strict=True):
            self.weights[part].copy_(weights_R)  # in place: the network's parameters are views of it


def run_replica_loop(rank, args, device):
    """Train until the Scoreboard says that the work is done."""
    replica = Replica(rank, args, device)
    # The scoreboard is the first server's. An RRef that arrives as an RPC's answer can be used like any other.
    scoreboard_rref = replica.server_rrefs[0].rpc_sync(timeout=0).get_scoreboard()
    images, labels = (tensor.to(device) for tensor in load_digits(args, train=True))
    shard = Shard(images, labels, args, rank - trainers(args)[0], len(trainers(args)))

    # timeout=0: no limit. This call waits for the slowest trainer, and for the evaluation.
    while place := scoreboard_rref.rpc_sync(timeout=0).next_epoch(rank):
        epoch, first_batch = place
        torch.manual_seed(seed_for(args.seed, rank, epoch, first_batch))  # dropout: different on every trainer
        replica.pull()
        images_seen = batches_done = 0  # since the last push
        for batch, (data, target) in enumerate(shard.batches(epoch, first_batch), start=first_batch):
            loss = F.nll_loss(replica.net(data), target)
            loss.backward()  # adds to replica.gradient
            images_seen, batches_done = images_seen + len(target), batches_done + 1
            if batches_done == args.sync_every or batch + 1 == shard.num_batches:
                replica.push(images_seen, batches_done)
                images_seen = batches_done = 0
            else:
                replica.step_locally()
            if batch % args.log_interval == 0:
                scoreboard_rref.rpc_sync().record_loss(rank, batch, loss.item())
