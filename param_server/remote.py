"""Mode `remote`, the tutorial's: the network and its optimizer are on the server, to which the trainers send images.

A step begins at the top: run_loops (in server1, rank 0; main.py calls it by ParameterServer.run_batches) starts the
trainers' loops, by one long call to each. In a trainer follow Trainer.run_training_loop and TrainerNet.forward, which
calls ParameterServer.forward. The backward pass begins in the trainer and goes on in the server. Last come
ServerSGD.step and ParameterServer.apply_gradients.

trainer is a trainer's rank, an int. Shapes: B images in a batch.
"""

import copy
import itertools
import sys
import threading

from glue.open_calls import OpenCalls
from glue.training import check_finite, seed_for

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.func import functional_call

from counts import Counts, Origin
from data import Batches, load_digits
from net import Net


def run_loops(server, epoch, batches, report):
    """Let each trainer train with its share of the batches, in turn, in a loop of its own; wait for all.

    Raises the error of a trainer that fails while the others still train.
    """
    updates = server.counts.updates - server.counts.batch  # before the first batch of this epoch
    for place, (trainer, rref) in enumerate(server.trainers.items()):
        share = batches[place :: len(server.trainers)]
        server.calls.add(trainer, rref.rpc_async(timeout=0).run_training_loop(epoch, share))  # timeout=0: no time limit
    losses = itertools.chain(*server.calls.results().values())
    for batch, loss in sorted(losses):
        report.scalar("loss", loss, updates + batch + 1)  # each batch is an update, nearly in this order


class Trainer:  # in a trainer, on the RPC thread that serves run_training_loop
    """Source: tutorial, run_training_loop."""

    def __init__(self, server_rref, plan, data_dir):
        self.rank = rpc.get_worker_info().id
        digits = load_digits(plan.dataset, data_dir, plan.seed, train=True)
        self.batches = Batches(*digits, plan.batch_size, plan.seed)
        self.net = TrainerNet(server_rref)
        param_rrefs = self.net.get_global_param_rrefs()
        self.opt = DistributedOptimizer(ServerSGD, param_rrefs, server_rref=server_rref, trainer=self.rank)
        self.log_interval = plan.log_interval
        self.steps = 0

    def count_images(self):
        return len(self.batches.images)

    def run_training_loop(self, epoch, batches):
        """Train with these batches; return [(batch, loss)] of those whose loss was printed."""
        losses = []
        for batch in batches:
            data, target = self.batches.get(epoch, batch)
            # In each process that takes part, the context keeps this batch's gradients apart from those of all other
            # batches. So this loop needs no zero_grad, and gradients of different trainers are not added up.
            with torch.profiler.record_function("step"), dist_autograd.context() as context_id:
                model_output = self.net(batch, data)
                loss = F.nll_loss(model_output, target)
                dist_autograd.backward(context_id, [loss])  # continues on the server, behind the RPC
                self.opt.step(context_id)
            if self.steps % self.log_interval == 0:
                losses.append((batch, loss.item()))
                print_loss(self.rank, batch, loss.item())
            self.steps += 1
        return losses


def print_loss(trainer, batch, loss):
    """Print the loss of a batch, in a trainer, in the tutorial's words."""
    # On a terminal, first erase the progress bar, which server1 draws on the line of the cursor, and draws again.
    erase = "\r\033[K" if sys.stdout.isatty() else ""
    print(f"{erase}Rank {trainer} training batch {batch} loss {loss}")


class TrainerNet(nn.Module):  # in a trainer
    """A network whose forward pass is a remote call. Source: tutorial, TrainerNet."""

    def __init__(self, server_rref):
        super().__init__()
        self.rank = rpc.get_worker_info().id
        # An RRef is a reference to an object in another process. The object lives as long as there is an RRef to it.
        self.param_server_rref = server_rref

    def get_global_param_rrefs(self):
        """Return an RRef to each parameter to optimize. All of them are on the server: this module has none."""
        return self.param_server_rref.rpc_sync().get_param_rrefs()

    def forward(self, batch, x):
        """Return the server's log-probabilities (B, 10) for images (B, 1, 28, 28). `batch`: its number."""
        return self.param_server_rref.rpc_sync().forward(self.rank, batch, x)


class ServerSGD:  # in server1, on RPC threads
    """The optimizer that each trainer's DistributedOptimizer makes on the server. It calls the server's one SGD.

    DistributedOptimizer(optim.SGD, ...) would make an SGD for each trainer. Each SGD would have a momentum of its own
    for the same weights, and its step would not take the lock under which the weights are cloned. DistributedOptimizer
    accepts any class that has such a constructor and a step().
    """

    def __init__(self, params, server_rref, trainer):
        self.server = server_rref.local_value()
        self.trainer = trainer

    def step(self):
        # torch holds a lock of its own from before it fills `param.grad` until this returns.
        self.server.apply_gradients(self.trainer)


class ParameterServer:  # in server1
    """The network, its one optimizer, and the lock that protects the weights. Source: tutorial, ParameterServer.

    The tutorial's version fails with two trainers: "one of the variables needed for gradient computation has been
    modified by an inplace operation". The reason: between a trainer's forward and its backward pass, another trainer's
    optimizer step changes the weights in place. So each forward pass uses a *snapshot*, a clone of the weights that is
    never changed. Autograd records the cloning, so the backward pass continues through it to the real parameters.
    """

    TRAINER_THREADS = 16  # RPC threads of a trainer, torch's default. run_training_loop occupies one of them

    def __init__(self, plan, devices, folders, bar):
        """`devices`, `folders`: where each rank computes, and reads its data. `bar`: a progress bar of images."""
        self.counts = Counts(bar)
        torch.manual_seed(seed_for(plan.seed, "net"))
        self.model = Net(plan.num_gpus or (0 if devices[0] == "cpu" else 1))  # without --num_gpus, --device decides
        self.input_device = next(self.model.parameters()).device
        self.optimizer = optim.SGD(self.model.parameters(), lr=plan.lr, momentum=plan.momentum)
        # It guards the weights, the counts, and the dict below. It is not held during a forward or backward pass.
        self.lock = threading.Lock()
        self.forwards = {}  # {trainer: the Origin of the gradient that its last forward pass leads to}
        # functional_call replaces a module's parameters by a snapshot for the time of a call. If all RPC threads shared
        # one module, they would replace each other's snapshots: no error, but the model would never learn. So each
        # trainer has a module of its own. A trainer waits for each answer, so no two threads use its module at the same
        # time. On the device "meta" weights use no memory.
        layers = copy.deepcopy(self.model).to("meta").train(not plan.no_dropout)
        ranks = range(1, plan.world_size)
        self.layers_of = {trainer: copy.deepcopy(layers) for trainer in ranks}
        # The trainers get this reference and call the server through it. The server itself is not copied.
        rref = rpc.RRef(self)
        # remote() does not wait: all trainers read their images at the same time. timeout=0: no time limit.
        self.trainers = {rank: rpc.remote(rank, Trainer, args=(rref, plan, folders[rank]), timeout=0) for rank in ranks}
        self.calls = OpenCalls()

    def run_batches(self, epoch, batches, report):
        """Let the trainers train with these batches, which are given by their numbers. On the main thread."""
        run_loops(self, epoch, batches, report)

    # Trainers call the next two methods, several at once, on RPC threads.

    def get_param_rrefs(self):
        """Return an RRef to each parameter, for DistributedOptimizer."""
        return [rpc.RRef(param) for param in self.model.parameters()]

    def forward(self, trainer, batch, inp):
        """Return log-probabilities (B, 10) for images (B, 1, 28, 28), all on the CPU: RPC's CUDA support is beta."""
        with self.lock:  # only the cloning needs it
            snapshot = {name: param.clone() for name, param in self.model.named_parameters()}
            self.forwards[trainer] = Origin(batch, trainer, self.counts.updates, len(inp))
        # Dropout is torch's. Its random numbers come from one generator, which all RPC threads of this process share.
        output = functional_call(self.layers_of[trainer], snapshot, (inp.to(self.input_device),))
        return output.cpu()

    def apply_gradients(self, trainer):
        """Update the weights with the gradients that torch has put into `param.grad`. ServerSGD.step calls it."""
        with self.lock:
            self.verify_gradients(trainer)
            self.optimizer.step()
            self.optimizer.zero_grad()  # sets each grad to None, so that a gradient that is missing is noticed
            self.counts.add_update(self.forwards[trainer])

    def verify_gradients(self, trainer):
        """Raise an error if a gradient is missing, infinite or NaN.

        In the tutorial the trainer makes such a check, for which all gradients and weights (9.6 MB) are sent each time.
        """
        for name, param in self.model.named_parameters():
            if param.grad is None:
                raise RuntimeError(f"rank {trainer}'s backward pass produced no gradient for {name}")
            check_finite(param.grad.sum(), f"sum of rank {trainer}'s gradient for {name}", self.counts.updates + 1)
