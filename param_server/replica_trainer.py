"""Mode `replica`, the trainer's side: compute on a copy of the network, push gradients, take fresh weights.

Runs in each trainer process.  What crosses the wire is of the weights' size, not of the batch's as in mode `remote`.

Shapes: P weights in the whole network, R in one server's range; B images in a batch.
"""

import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from digits_net import Net
from glue.meter import Meter
from glue.report import check_finite
from glue.tensors import seed_for, to_wire
from replica_server import server_rref
from rpc_names import range_of


class Replica:
    """A trainer's copy of the network, and its connection to the servers of its weights."""

    def __init__(self, rank, net, device, num_servers):
        self.rank, self.net, self.device = rank, net, device
        self.first, *self.others = (server_rref(index) for index in range(num_servers))
        size = sum(param.numel() for param in net.parameters())
        self.first_range, *self.other_ranges = (range_of(index, num_servers, size) for index in range(num_servers))
        self.version, self.weights_P = 0, None  # as the servers last gave them
        self.under_way = None  # Future of the push that is not answered yet

    def pull(self):
        """Take the current weights."""
        self.under_way = self.first.rpc_async().pull(self.version)
        self.take_answer()

    def push(self, images, batches):
        """Send the gradient of so many images and batches to all servers.  take_answer() waits for what it brings."""
        gradient_P, version = to_wire(self.gradient()), self.version
        self.net.zero_grad()
        self.take_answer()  # --overlap: the last push was under way while this gradient was computed
        others = zip(self.others, self.other_ranges, strict=True)
        held = [rref.rpc_async().hold(self.rank, gradient_P[part], images) for rref, part in others]
        torch.futures.wait_all(held)  # before the first server has its part: see replica_server.py
        # timeout=0: no limit. The server may hold the answer back until slower trainers have caught up.
        push = self.first.rpc_async(timeout=0).push
        self.under_way = push(self.rank, version, gradient_P[self.first_range], images, batches)

    def take_answer(self):
        """Wait for the weights that the last push brings, unless they are here already, and compute with them."""
        if self.under_way:
            self.version, weights_R, log = self.under_way.wait()
            others_R = torch.futures.wait_all([rref.rpc_async().catch_up(*log) for rref in self.others])
            self.weights_P = (torch.cat([weights_R, *others_R]) if others_R else weights_R).to(self.device)
            vector_to_parameters(self.weights_P, self.net.parameters())  # as views: no copy
            self.under_way = None

    def step_locally(self, lr):
        """Between two pushes (--sync_every): step from the servers' weights by the gradients since then."""
        vector_to_parameters(torch.sub(self.weights_P, self.gradient(), alpha=lr), self.net.parameters())

    def gradient(self):
        """Return all gradients (P,).  A new tensor each time: RPC may still be reading the last."""
        return parameters_to_vector(param.grad for param in self.net.parameters())


def run_replica_loop(rank, args, batches, device):
    """Train until the Scoreboard says that the work is done."""
    meter = Meter(args.transport)
    replica = Replica(rank, Net(dropout=not args.no_dropout).to(device), device, args.num_servers)
    # The scoreboard is the first server's. An RRef that arrives as an RPC's answer can be used like any other.
    scoreboard_rref = replica.first.rpc_sync().get_scoreboard()

    # timeout=0: no limit. This call waits for the slowest trainer, and for the evaluation.
    while task := scoreboard_rref.rpc_sync(timeout=0).next_lot(rank, batches.per_epoch, meter.figures()):
        epoch, lr, lot = task
        replica.pull()
        images_seen = batches_done = 0  # since the last push
        for step, (batch, data, target) in enumerate(meter.over(batches.of(epoch, lot))):
            if replica.net.masks:  # the same for whoever trains this batch, today or after --resume
                replica.net.masks.manual_seed(seed_for(args.seed, "dropout", epoch, batch))
            loss = F.nll_loss(replica.net(data), target)
            check_finite(loss.item(), "loss", batch)
            loss.backward()
            images_seen, batches_done = images_seen + len(target), batches_done + 1
            if batches_done == args.sync_every or step + 1 == len(lot):
                replica.push(images_seen, batches_done)
                images_seen = batches_done = 0
                if not args.overlap:
                    replica.take_answer()
            else:
                replica.step_locally(lr)
            if step % args.log_interval == 0:
                scoreboard_rref.rpc_sync().record_loss(rank, batch, loss.item())
        replica.take_answer()
