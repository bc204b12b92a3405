"""Mode `replica`: a trainer computes with a copy of the network, pushes gradients to the server, and gets new weights.

This does not extend remote.py but is another pattern, so read it by itself, in the order of a step: Trainer.train and
Trainer.push (in a trainer), ParameterServer.push (in server1), Trainer.load. No trainer waits for another one. Modes
`bounded`, `sync`, `overlap` and `sharded` are this one with one idea more each.
The forward and the backward pass are local, so there is no distributed autograd and no DistributedOptimizer: a gradient
is an argument of a call. A message is as large as the weights. (In mode `remote` it is as large as a batch.)
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.

trainer is a trainer's rank, an int. Shapes: P weights in the whole network (1,199,882), joined into one tensor.
"""

from dataclasses import dataclass

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import optim
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from coordinator import Coordinator, get_parameter_server
from glue.report import Meter, check_finite
from glue.seeds import seed_for
from net import Net
from ranks import SERVER


@dataclass
class Push:
    """What a trainer sends to the server: the gradient of one batch, and how many images the batch had."""

    trainer: int
    version: int  # number of updates that had been made when this trainer read the weights
    images: int
    gradient_P: torch.Tensor


class Trainer:  # in a trainer
    """Trains a copy of the network."""

    def __init__(self, rank, plan, device):
        self.rank = rank
        self.seed = plan.seed
        self.device = device
        self.net = Net().to(device).train(not plan.no_dropout)
        self.server_rref = rpc.remote(SERVER, get_parameter_server)
        self.version = None  # of the weights in `net`

    def train(self, batches, log_interval):
        """Train until the server has no more batches."""
        meter = Meter()  # counts the steps, and marks them for tools/trace.py; the Coordinator takes the time
        while assignment := self.next_assignment(batches.per_epoch):
            epoch, _ = assignment
            for batch, data, target in batches.of(*assignment):
                with meter.step():
                    # Only this thread computes here, so with a seed for each batch, dropout is the same in every run.
                    torch.manual_seed(seed_for(self.seed, "dropout", epoch, batch))
                    loss = F.nll_loss(self.net(data), target)
                    loss.backward()
                    self.push(len(target))
                if (meter.steps - 1) % log_interval == 0:
                    self.server_rref.rpc_sync().record_loss(self.rank, batch, loss.item())

    def next_assignment(self, batches_per_epoch):
        """Wait for batches to do, and get the current weights; return (epoch, numbers of the batches) or None."""
        # timeout=0: no time limit, because this call waits for the slowest trainer and for the evaluation.
        assignment = self.server_rref.rpc_sync(timeout=0).next_assignment(self.rank, batches_per_epoch)
        self.pull()  # others may have pushed since the server last answered
        return assignment

    def pull(self):
        self.load(self.server_rref.rpc_sync().pull())

    def push(self, images):
        """Push the gradient of a batch, and get the weights that the server has afterwards."""
        # timeout=0: no time limit, because in some modes the server answers when slower trainers have caught up.
        self.load(self.server_rref.rpc_sync(timeout=0).push(self.take_gradient(images)))

    def take_gradient(self, images):
        """Return the gradient as a Push, and set the network's to None."""
        gradient_P = parameters_to_vector(param.grad for param in self.net.parameters()).cpu()
        self.net.zero_grad()
        return Push(self.rank, self.version, images, gradient_P)

    def load(self, answer):
        """Load the server's answer (version, weights (P,)) into the network."""
        self.version, weights_P = answer
        # The parameters become views of the tensor: no copy.
        vector_to_parameters(weights_P.to(self.device), self.net.parameters())


class ParameterServer(Coordinator):  # in server1, on RPC threads
    """The weights, and the SGD that updates them with each push."""

    def __init__(self, plan, device):
        super().__init__(plan)
        torch.manual_seed(seed_for(plan.seed, "net"))
        self.model = Net().to(device)
        # All weights in one tensor. The model's parameters become views of it, so the model changes when the optimizer
        # changes this tensor in place. And the answer to a push is a single tensor.
        self.weights_P = parameters_to_vector(self.model.parameters()).detach()
        vector_to_parameters(self.weights_P, self.model.parameters())
        self.optimizer = optim.SGD([self.weights_P], lr=plan.lr, momentum=plan.momentum)

    # Trainers call the next two methods, several at once.

    def pull(self):
        """Return (version, weights (P,))."""
        with self.lock:
            # A copy, because an update would change the weights while RPC may still be sending them.
            return self.updates, self.weights_P.to("cpu", copy=True)

    def push(self, push):
        """Update the weights with the gradient of a Push; return (version, weights (P,)) after it."""
        with self.lock:
            self.verify(push)
            self.update([push], push.gradient_P)
            return self.pull()  # which takes the lock again, as a Condition allows to the thread that has it

    # The next two methods are called under the lock.

    def verify(self, push):
        """Raise an error if this push is of a lost trainer, or if its gradient is infinite or NaN."""
        self.refuse_if_lost(push.trainer)
        check_finite(push.gradient_P.sum(), f"sum of rank {push.trainer}'s gradient", self.updates + 1)

    def update(self, pushes, gradient_P):
        """Update the weights with the gradient of these pushes."""
        self.weights_P.grad = gradient_P.to(self.weights_P.device)
        self.optimizer.step()
        self.count_update([(push.trainer, push.images, push.version) for push in pushes])
