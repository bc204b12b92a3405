"""Mode `replica`, the trainer's side: compute on a copy of the network, push gradients, take fresh weights.

Runs in each trainer process.  What crosses the wire is of the weights' size, not of the batch's as in mode `remote`.

Shapes: P weights in the whole network, R in one server's range; B images in a batch.
"""

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F

from digits_net import Net
from flat_weights import flatten_gradients, flatten_parameters, range_of
from glue.measure import Meter
from glue.placement import to_wire
from glue.report import check_finite
from glue.seeds import seed_for
from replica_server import get_range_server
from rpc_names import server_name


class Replica:
    """A trainer's copy of the network, and its connection to the servers of its weights."""

    def __init__(self, rank, net, num_servers):
        self.rank, self.net = rank, net
        self.weights, self.gradient = flatten_parameters(net), flatten_gradients(net)
        self.server_rrefs = [rpc.remote(server_name(index), get_range_server) for index in range(num_servers)]
        self.ranges = [range_of(index, num_servers, len(self.weights)) for index in range(num_servers)]
        self.answers = []  # of each server: (version, learning rate, weights (R,))

    def pull(self):
        """Take the current weights."""
        self._receive([rref.rpc_async().pull() for rref in self.server_rrefs])

    def push(self, images, batches):
        """Send the gradient of so many images and batches to all servers at once; take the weights that come back."""
        futures = []
        for rref, part, (version, _, _) in zip(self.server_rrefs, self.ranges, self.answers, strict=True):
            gradient_R = to_wire(self.gradient[part])
            # timeout=0: no limit. The server may hold the answer back until slower trainers have caught up.
            futures.append(rref.rpc_async(timeout=0).push(self.rank, version, gradient_R, images, batches))
        self._receive(futures)
        self.gradient.zero_()  # only now: until the answer came, RPC may still have been reading it

    def step_locally(self):
        """Between two pushes (--sync_every): step from the last answer's weights by the gradients since then."""
        for part, (_, lr, weights_R) in zip(self.ranges, self.answers, strict=True):
            torch.sub(weights_R.to(self.weights.device), self.gradient[part], alpha=lr, out=self.weights[part])

    def _receive(self, futures):
        self.answers = torch.futures.wait_all(futures)
        for part, (_, _, weights_R) in zip(self.ranges, self.answers, strict=True):
            self.weights[part].copy_(weights_R)  # in place: the network's parameters are views of it


def run_replica_loop(rank, args, shard, device):
    """Train until the Scoreboard says that the work is done."""
    meter = Meter(args.transport)
    replica = Replica(rank, Net(dropout=not args.no_dropout).to(device), args.num_servers)
    # The scoreboard is the first server's. An RRef that arrives as an RPC's answer can be used like any other.
    scoreboard_rref = replica.server_rrefs[0].rpc_sync().get_scoreboard()

    # timeout=0: no limit. This call waits for the slowest trainer, and for the evaluation.
    while place := scoreboard_rref.rpc_sync(timeout=0).next_epoch(rank, meter.figures()):
        epoch, first_batch = place
        replica.pull()
        images_seen = batches_done = 0  # since the last push
        for batch, (data, target) in enumerate(meter.over(shard.batches(epoch, first_batch)), start=first_batch):
            # Dropout: different on every trainer, and after --resume as if the run had never been interrupted.
            torch.manual_seed(seed_for(args.seed, rank, epoch, batch))
            loss = F.nll_loss(replica.net(data), target)
            check_finite(loss.item(), "loss", batch)
            loss.backward()  # adds to replica.gradient
            images_seen, batches_done = images_seen + len(target), batches_done + 1
            if batches_done == args.sync_every or batch + 1 == shard.num_batches:
                replica.push(images_seen, batches_done)
                images_seen = batches_done = 0
            else:
                replica.step_locally()
            if batch % args.log_interval == 0:
                scoreboard_rref.rpc_sync().record_loss(rank, batch, loss.item())
