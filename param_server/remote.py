"""Mode `remote`, the tutorial's: the network and its optimizer are on the server, to which the trainers send images.

Read it in the order of a step: train and TrainerNet.forward (in a trainer), ParameterServer.forward (in server1), and,
after the backward pass, which begins in the trainer and continues in the server, ServerSGD.step and
ParameterServer.apply_gradients.

trainer is a trainer's rank, an int. Shapes: B images in a batch.
"""

import copy
import threading

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.func import functional_call

from coordinator import coordinator_rref
from glue import UserError
from glue.report import Meter, check_finite
from net import Net, devices_of
from ranks import server_name, trainers

param_server = None  # the one ParameterServer of this process


def make_server(rank, args, device, coordinator):
    """Make this process's server from its own command line, before init_rpc. (In the tutorial the first trainer does.)

    The network's devices are those of --num_gpus, not `device`.
    """
    global param_server
    param_server = ParameterServer(args, coordinator)
    coordinator.servers = param_server


def get_parameter_server():
    return param_server


def train(rank, args, batches, device):
    """Train until the Coordinator has no more assignments. In a trainer. Source: tutorial, `run_training_loop`."""
    meter = Meter()
    net = TrainerNet(rank, device)
    opt = DistributedOptimizer(ServerSGD, net.get_global_param_rrefs(), trainer=rank)
    coordinator = coordinator_rref()
    # timeout=0: no time limit, because this call waits for the slowest trainer and for the evaluation.
    while assignment := coordinator.rpc_sync(timeout=0).next_assignment(rank, batches.size):
        for batch, data, target in batches.of(assignment.epoch, assignment.batches):
            # In each process that takes part, the context keeps this batch's gradients apart from those of all other
            # batches. So this loop needs no zero_grad, and the gradients of different trainers are not added up.
            with meter.step(), dist_autograd.context() as context_id:
                model_output = net(data)
                loss = F.nll_loss(model_output, target)
                check_finite(loss.item(), "loss", batch)
                dist_autograd.backward(context_id, [loss])  # continues on the server, behind the RPC
                opt.step(context_id)
            if (meter.steps - 1) % args.log_interval == 0:
                coordinator.rpc_sync().record_loss(rank, batch, loss.item())


class TrainerNet(nn.Module):
    """A network whose forward pass is a remote call. In a trainer. Source: tutorial, class `TrainerNet`."""

    def __init__(self, rank, device):
        super().__init__()
        self.rank = rank
        self.device = device
        # An RRef is a reference to an object in another process. The object lives as long as there is an RRef to it.
        self.param_server_rref = rpc.remote(server_name(0), get_parameter_server)

    def get_global_param_rrefs(self):
        """Return an RRef to each parameter to optimize. All of them are on the server: this module has none."""
        return self.param_server_rref.rpc_sync().get_param_rrefs()

    def forward(self, x):
        """Return the server's log-probabilities (B, 10) for images (B, 1, 28, 28)."""
        # RPC's CUDA support is beta, so tensors travel on the CPU. Autograd follows cpu() and to().
        output = self.param_server_rref.rpc_sync().forward(self.rank, x.cpu())
        return output.to(self.device)


class ParameterServer(nn.Module):
    """The network, its one optimizer, and the lock that protects the weights. In server1.

    The tutorial's version fails with two trainers: "one of the variables needed for gradient computation has been
    modified by an inplace operation". The reason: between a trainer's forward and its backward pass, another trainer's
    optimizer step changes the weights in place. So each forward pass uses a *snapshot*, a clone of the weights that is
    never changed. Autograd records the cloning, so the backward pass continues through it to the real parameters.
    """

    def __init__(self, args, coordinator):
        super().__init__()
        self.coordinator = coordinator
        self.momentum = args.momentum
        self.input_device, _ = devices_of(args.num_gpus)
        torch.manual_seed(args.seed)
        self.model = Net(num_gpus=args.num_gpus)
        # Held while weights are cloned or changed. Not held during a forward or backward pass, or a wait for an RPC.
        self.lock = threading.Lock()
        self.optimizer = optim.SGD(self.model.parameters(), lr=args.lr, momentum=args.momentum)
        # functional_call replaces a module's parameters by a snapshot for the time of a call. If all RPC threads shared
        # one module, they would replace each other's snapshots: no error, but the model would never learn. So each
        # trainer has a module of its own. A trainer waits for each answer, so no two threads use its module at the same
        # time. On the device "meta" weights use no memory.
        layers = copy.deepcopy(self.model).to("meta").train(not args.no_dropout)
        self.layers_of = {trainer: copy.deepcopy(layers) for trainer in trainers(args)}
        self.version_of = {}  # {trainer: number of updates before the snapshot of its forward pass}
        self.steps_left = {}  # {trainer: number of steps that are left of its assignment}
        self.lost = set()

    # Trainers call the next three methods, on RPC threads, several at once.

    def get_param_rrefs(self):
        """Return an RRef to each parameter, for DistributedOptimizer."""
        return [rpc.RRef(param) for param in self.model.parameters()]

    def forward(self, trainer, inp):
        """Return log-probabilities (B, 10) for images (B, 1, 28, 28)."""
        with self.lock:  # only the cloning needs it
            self.refuse_if_not_at_work(trainer)
            snapshot = {name: param.clone() for name, param in self.model.named_parameters()}
            self.version_of[trainer] = self.coordinator.updates
        # Dropout is torch's. Its random numbers come from one generator, which all RPC threads of this process share,
        # so a run with several trainers cannot be repeated, unless it has --no_dropout.
        output = functional_call(self.layers_of[trainer], snapshot, (inp.to(self.input_device),))
        return output.cpu()

    def apply_gradients(self, trainer):
        """Update the weights with the gradients that torch has put into `param.grad`. ServerSGD.step calls it."""
        with self.lock:
            try:
                self.refuse_if_not_at_work(trainer)
                self.verify_gradients(trainer)
                self.optimizer.step()
            finally:  # sets each grad to None, so that verify_gradients notices a gradient that is missing next time
                self.optimizer.zero_grad()
            self.steps_left[trainer] -= 1
            staleness = self.coordinator.updates - self.version_of[trainer]
            self.coordinator.count_update([(trainer, 1, staleness)])

    def refuse_if_not_at_work(self, trainer):
        """Raise an error if a trainer was lost (it may only have been stopped for a while), or has no batches left."""
        if trainer in self.lost:
            raise UserError(f"rank {trainer} was lost; its batches go to other trainers")
        if not self.steps_left[trainer]:
            raise RuntimeError(f"rank {trainer} called after the last batch of its assignment")

    def verify_gradients(self, trainer):
        """Raise an error if a gradient is missing, infinite or NaN.

        In the tutorial the trainer makes such a check, for which all gradients and weights (9.6 MB) are sent each time.
        """
        for name, param in self.model.named_parameters():
            if param.grad is None:
                raise RuntimeError(f"rank {trainer}'s backward pass produced no gradient for {name}")
            check_finite(param.grad.sum(), f"sum of rank {trainer}'s gradient for {name}", self.coordinator.updates)

    # The Coordinator calls the rest, in the same process: lose() at any time, the others when all trainers wait.

    def start(self, lr, steps):
        """Begin an assignment. `steps`: {trainer: how many it makes}."""
        with self.lock:  # because a trainer may be lost at any moment
            self.optimizer.param_groups[0]["lr"] = lr
            self.steps_left = steps

    def lose(self, trainer):
        """Refuse everything from a lost trainer."""
        with self.lock:
            self.lost.add(trainer)

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["momentum"] = self.momentum  # a resumed run may have another one


class ServerSGD:
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
