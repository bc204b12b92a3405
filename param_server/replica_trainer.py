"""Mode `replica`, the trainer's side: compute with a copy of the network, push gradients, get new weights.

Runs in each trainer's process.  A message is as large as all weights of the network. (In mode `remote` it is as large
as a batch.)

Shapes: P weights in the whole network; B images in a batch.
"""

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from digits_net import Net
from glue.report import Meter, check_finite
from replica_server import Push, get_replica_server


class Replica:
    """A trainer's copy of the network, and its connection to the server."""

    def __init__(self, rank, server_rref, device):
        self.rank = rank
        self.server_rref = server_rref
        self.device = device
        self.net = Net().to(device)
        self.version = 0  # of the weights that the server has sent last
        self.weights_P = None
        self.answer = None  # Future of the answer to the last push, until wait_for_answer() has taken it

    def pull(self):
        """Get the current weights."""
        self.take(self.server_rref.rpc_sync().pull())

    def make_push(self, images, batches):
        """Return a Push of all gradients since the last one: of so many images, in so many batches."""
        push = Push(self.rank, self.version, images, batches, gradient=self.gradient().cpu())
        self.net.zero_grad()
        return push

    def send(self, push):
        """Send a push and return at once.  wait_for_answer() waits for the weights that come back."""
        # timeout=0: no time limit, because the server may answer only when slower trainers have caught up.
        self.answer = self.server_rref.rpc_async(timeout=0).push(push)

    def wait_for_answer(self):
        """Wait for the answer to the last push, and load its weights.  Return at once if this was done already."""
        if self.answer is not None:
            self.take(self.answer.wait())
            self.answer = None

    def take(self, answer):
        """Load the weights of an answer into the network: see ReplicaServer.answer."""
        self.version, weights_P = answer
        self.weights_P = weights_P.to(self.device)
        vector_to_parameters(self.weights_P, self.net.parameters())  # the parameters become views of weights_P: no copy

    def step_locally(self, lr):
        """Between two pushes (--sync_every): subtract lr times all gradients since the last push from its weights."""
        vector_to_parameters(torch.sub(self.weights_P, self.gradient(), alpha=lr), self.net.parameters())

    def gradient(self):
        """Return all gradients (P,), as a new tensor each time, because RPC may still be sending the last one."""
        return parameters_to_vector(param.grad for param in self.net.parameters())


def run_replica_loop(rank, args, batches, device):
    """Train with one server, until the Scoreboard has no more assignments."""
    train_replica(Replica(rank, rpc.remote("parameter_server", get_replica_server), device), args, batches)


def train_replica(replica, args, batches):
    """Train until the Scoreboard has no more assignments."""
    rank = replica.rank
    meter = Meter()
    # The Scoreboard is on rank 0. This RRef was the result of an RPC. It can be used like any other RRef.
    scoreboard_rref = replica.server_rref.rpc_sync().get_scoreboard()

    # timeout=0: no time limit, because this call waits for the slowest trainer and for the evaluation.
    while assignment := scoreboard_rref.rpc_sync(timeout=0).next_assignment(rank, batches.per_epoch):
        replica.pull()
        images_seen = 0  # since the last push
        batches_done = 0
        for step, (batch, data, target) in enumerate(batches.of(assignment.epoch, assignment.batches)):
            with meter.step():
                dropout_key = None if args.no_dropout else (args.seed, "dropout", assignment.epoch, batch)
                loss = F.nll_loss(replica.net(data, dropout_key), target)
                check_finite(loss.item(), "loss", batch)
                loss.backward()
                images_seen += len(target)
                batches_done += 1
                is_last = step + 1 == len(assignment.batches)
                if batches_done == args.sync_every or is_last:
                    push = replica.make_push(images_seen, batches_done)
                    if args.overlap:  # while this gradient was computed, the last push was under way
                        replica.wait_for_answer()
                    replica.send(push)
                    if not args.overlap:
                        replica.wait_for_answer()
                    images_seen = 0
                    batches_done = 0
                else:
                    replica.step_locally(assignment.lr)
            if step % args.log_interval == 0:
                scoreboard_rref.rpc_sync().record_loss(rank, batch, loss.item())
        replica.wait_for_answer()
