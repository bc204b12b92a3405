"""Mode `remote`, the server's side: the tutorial's ParameterServer, made safe for any number of trainers.

Runs in the process `parameter_server`, where the trainers call it over RPC.  The forward pass, the backward pass and
the optimizer's step of every trainer run in this process, each on an RPC thread, several at the same time.

Shapes: B images in a batch.
"""

import copy
import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.func import functional_call

from digits_net import Net, devices_of
from glue.report import check_finite
from rpc_names import trainers
from scoreboard import Scoreboard, Work

param_server = None  # the one ParameterServer of this process


def make_parameter_server(args):
    """Make this process's ParameterServer from its own command line, and return it.  Called before init_rpc."""
    global param_server
    param_server = ParameterServer(args)
    return param_server


def get_parameter_server():
    """Return this process's ParameterServer.  It only reads, so it needs no lock.

    (The tutorial's function also makes the server, when the first trainer calls.)
    """
    return param_server


class ParameterServer(nn.Module):
    """The network, its one optimizer, and the lock that protects the weights.

    The tutorial's version fails with two trainers: "one of the variables needed for gradient computation has been
    modified by an inplace operation". The reason: between a trainer's forward and its backward pass, another trainer's
    optimizer step changes the weights in place. So each forward pass uses a *snapshot*, a clone of the weights that is
    never changed. Autograd records the cloning, so the backward pass continues through it to the real parameters.
    """

    def __init__(self, args):
        super().__init__()
        self.seed = args.seed
        self.drop = not args.no_dropout
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
        layers = copy.deepcopy(self.model).to("meta")
        self.layers_of = {trainer: copy.deepcopy(layers) for trainer in trainers(args)}
        self.work_of = {}  # trainer -> the Work of its forward pass, until its optimizer step
        self.scoreboard = Scoreboard(args, self)

    # ---------------------------------------------------------------------- called by the trainers, over RPC

    def forward(self, trainer, inp):
        """Return log-probabilities (B, 10) for images (B, 1, 28, 28), on a consistent snapshot of the weights.

        May be called by all trainers at once.  Only the cloning of the weights needs the lock.
        """
        epoch, batch = self.scoreboard.batch_of(trainer)
        dropout_key = (self.seed, "dropout", epoch, batch) if self.drop else None
        with self.lock:
            snapshot = {name: param.clone() for name, param in self.model.named_parameters()}
            version = self.scoreboard.updates
        self.work_of[trainer] = Work(trainer, version, images=len(inp), batches=1)
        output = functional_call(self.layers_of[trainer], snapshot, (inp.to(self.input_device), dropout_key))
        return output.cpu()

    def get_param_rrefs(self):
        """Return an RRef to each parameter, for DistributedOptimizer.  It only reads, so it needs no lock."""
        return [rpc.RRef(param) for param in self.model.parameters()]

    def get_scoreboard(self):
        """Return an RRef to the job's Scoreboard.  It only reads, so it needs no lock."""
        return rpc.RRef(self.scoreboard)

    def apply_gradients(self, trainer):
        """Update the weights with the gradients that torch has put into `param.grad`.  Called by ServerSGD (locked)."""
        with self.lock:
            try:
                self.scoreboard.batch_of(trainer)  # raises if this trainer was lost
                self.verify_gradients(trainer)
                self.optimizer.step()
            finally:  # sets each grad to None, so that verify_gradients notices a gradient that is missing next time
                self.optimizer.zero_grad()
            checkpoint_due = self.scoreboard.count_update([self.work_of.pop(trainer)])
            if checkpoint_due:
                state = self.capture()  # copied now, under the lock; written later, without it
                self.scoreboard.save_soon(lambda: state)

    def verify_gradients(self, trainer):
        """Raise an error if a gradient is missing, infinite or NaN.  Runs under the lock.

        In the tutorial the trainer makes such a check, for which all gradients and weights (9.6 MB) are sent each time.
        """
        for name, param in self.model.named_parameters():
            if param.grad is None:
                raise RuntimeError(f"trainer_{trainer}'s backward pass produced no gradient for {name}")
            check_finite(param.grad.sum(), f"sum of trainer_{trainer}'s gradient for {name}", self.scoreboard.updates)

    # ---------------------------------------------------------------------- called by the Scoreboard, on rank 0

    def start_assignments(self, lr):
        """Set the learning rate.  All trainers are waiting for this, so it needs no lock."""
        self.optimizer.param_groups[0]["lr"] = lr

    def forget(self, trainer):
        """Remove a lost trainer from the living ones.  After this returns, none of its gradients is applied."""
        with self.lock:
            self.scoreboard.living.remove(trainer)

    def capture(self):
        """Return a copy of this server's part of a checkpoint.  Called under the lock, or while all trainers wait."""
        weights = {name: param.to("cpu", copy=True) for name, param in self.model.state_dict().items()}
        states = self.optimizer.state.values()  # empty without momentum
        return {"model": weights, "momentum": [state["momentum_buffer"].to("cpu", copy=True) for state in states]}

    def restore(self, state):
        """Continue from what capture() returned."""
        self.model.load_state_dict(state["model"])
        if state["momentum"]:
            for param, momentum in zip(self.model.parameters(), state["momentum"], strict=True):
                self.optimizer.state[param]["momentum_buffer"] = momentum.to(param.device)


class ServerSGD:
    """The optimizer that each trainer's DistributedOptimizer makes on the server.  It calls the server's one SGD.

    DistributedOptimizer(optim.SGD, ...) would make an SGD for each trainer. Each SGD would have a momentum of its own
    for the same weights, and its step would not take the lock under which the weights are cloned. DistributedOptimizer
    accepts any class that has such a constructor and a step().
    """

    def __init__(self, params, trainer):
        self.server, self.trainer = get_parameter_server(), trainer

    def step(self):
        """Apply the trainer's gradients.  Called by DistributedOptimizer.step.

        A lock of torch's own prevents two such calls at the same time.
        """
        self.server.apply_gradients(self.trainer)
