"""Mode `remote`, the tutorial's: the network and its optimizer are on the server, to which the trainers send images.

Read it in the order of a step: Trainer.train and TrainerNet.forward (in a trainer), ParameterServer.forward (in
server1), and, after the backward pass, which begins in the trainer and continues in the server, ServerSGD.step and
ParameterServer.apply_gradients.

trainer is a trainer's rank, an int. Shapes: B images in a batch.
"""

import copy

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.func import functional_call

from coordinator import Coordinator, get_parameter_server
from glue.report import Meter, check_finite
from glue.seeds import seed_for
from net import Net
from ranks import SERVER


class Trainer:  # in a trainer
    """Source: tutorial, run_training_loop."""

    def __init__(self, rank, plan, device):
        self.rank = rank
        self.net = TrainerNet(rank)  # `device` is the CPU here, because the network is on the server
        self.opt = DistributedOptimizer(ServerSGD, self.net.get_global_param_rrefs(), trainer=rank)

    def train(self, batches, log_interval):
        """Train until the server has no more batches."""
        meter = Meter()  # counts the steps, and marks them for tools/trace.py; the Coordinator takes the time
        server = self.net.param_server_rref
        # timeout=0: no time limit, because this call waits for the slowest trainer and for the evaluation.
        while assignment := server.rpc_sync(timeout=0).next_assignment(self.rank, batches.per_epoch):
            for batch, data, target in batches.of(*assignment):
                # In each process that takes part, the context keeps this batch's gradients apart from those of all
                # other batches. So this loop needs no zero_grad, and gradients of different trainers are not added up.
                with meter.step(), dist_autograd.context() as context_id:
                    model_output = self.net(data)
                    loss = F.nll_loss(model_output, target)
                    dist_autograd.backward(context_id, [loss])  # continues on the server, behind the RPC
                    self.opt.step(context_id)
                if (meter.steps - 1) % log_interval == 0:
                    server.rpc_sync().record_loss(self.rank, batch, loss.item())


class TrainerNet(nn.Module):  # in a trainer
    """A network whose forward pass is a remote call. Source: tutorial, TrainerNet."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        # An RRef is a reference to an object in another process. The object lives as long as there is an RRef to it.
        self.param_server_rref = rpc.remote(SERVER, get_parameter_server)

    def get_global_param_rrefs(self):
        """Return an RRef to each parameter to optimize. All of them are on the server: this module has none."""
        return self.param_server_rref.rpc_sync().get_param_rrefs()

    def forward(self, x):
        """Return the server's log-probabilities (B, 10) for images (B, 1, 28, 28)."""
        return self.param_server_rref.rpc_sync().forward(self.rank, x)


class ParameterServer(Coordinator):  # in server1, on RPC threads
    """The network, its one optimizer, and the lock that protects the weights. Source: tutorial, ParameterServer.

    The tutorial's version fails with two trainers: "one of the variables needed for gradient computation has been
    modified by an inplace operation". The reason: between a trainer's forward and its backward pass, another trainer's
    optimizer step changes the weights in place. So each forward pass uses a *snapshot*, a clone of the weights that is
    never changed. Autograd records the cloning, so the backward pass continues through it to the real parameters.
    """

    def __init__(self, plan, device):
        super().__init__(plan)
        num_gpus = 2 if plan.num_gpus == 2 else int(device.type == "cuda")
        torch.manual_seed(seed_for(plan.seed, "net"))
        self.model = Net(num_gpus=num_gpus)
        self.input_device = next(self.model.parameters()).device
        self.optimizer = optim.SGD(self.model.parameters(), lr=plan.lr, momentum=plan.momentum)
        # functional_call replaces a module's parameters by a snapshot for the time of a call. If all RPC threads shared
        # one module, they would replace each other's snapshots: no error, but the model would never learn. So each
        # trainer has a module of its own. A trainer waits for each answer, so no two threads use its module at the same
        # time. On the device "meta" weights use no memory.
        layers = copy.deepcopy(self.model).to("meta").train(not plan.no_dropout)
        self.layers_of = {trainer: copy.deepcopy(layers) for trainer in range(1, plan.world_size)}
        self.forwards = {}  # {trainer: (images of its last forward pass, number of updates before its snapshot)}

    # Trainers call the next three methods, several at once.

    def get_param_rrefs(self):
        """Return an RRef to each parameter, for DistributedOptimizer."""
        return [rpc.RRef(param) for param in self.model.parameters()]

    def forward(self, trainer, inp):
        """Return log-probabilities (B, 10) for images (B, 1, 28, 28), all on the CPU: RPC's CUDA support is beta."""
        with self.lock:  # only the cloning needs it
            self.refuse_if_lost(trainer)
            snapshot = {name: param.clone() for name, param in self.model.named_parameters()}
            self.forwards[trainer] = (len(inp), self.updates)
        # Dropout is torch's. Its random numbers come from one generator, which all RPC threads of this process share,
        # so a run with several trainers cannot be repeated, unless it has --no_dropout.
        output = functional_call(self.layers_of[trainer], snapshot, (inp.to(self.input_device),))
        return output.cpu()

    def apply_gradients(self, trainer):
        """Update the weights with the gradients that torch has put into `param.grad`. ServerSGD.step calls it."""
        with self.lock:
            try:
                self.refuse_if_lost(trainer)
                self.verify_gradients(trainer)
                self.optimizer.step()
            finally:  # sets each grad to None, so that verify_gradients notices a gradient that is missing next time
                self.optimizer.zero_grad()
            self.count_update([(trainer, *self.forwards[trainer])])

    def verify_gradients(self, trainer):
        """Raise an error if a gradient is missing, infinite or NaN.

        In the tutorial the trainer makes such a check, for which all gradients and weights (9.6 MB) are sent each time.
        """
        for name, param in self.model.named_parameters():
            if param.grad is None:
                raise RuntimeError(f"rank {trainer}'s backward pass produced no gradient for {name}")
            check_finite(param.grad.sum(), f"sum of rank {trainer}'s gradient for {name}", self.updates + 1)


class ServerSGD:  # in server1, on RPC threads
    """The optimizer that each trainer's DistributedOptimizer makes on the server. It calls the server's one SGD.

    DistributedOptimizer(optim.SGD, ...) would make an SGD for each trainer. Each SGD would have a momentum of its own
    for the same weights, and its step would not take the lock under which the weights are cloned. DistributedOptimizer
    accepts any class that has such a constructor and a step().
    """

    def __init__(self, params, trainer):
        self.trainer = trainer

    def step(self):
        # torch holds a lock of its own from before it fills `param.grad` until this returns.
        get_parameter_server().apply_gradients(self.trainer)
