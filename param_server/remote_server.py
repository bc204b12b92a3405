"""Mode `remote`, the server's side: the tutorial's ParameterServer, made safe for any number of trainers.

Runs in the process `parameter_server`, called by the trainers over RPC: every trainer's forward, backward and
optimizer's step happen here, several at a time, each in an RPC thread.

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
from glue.tensors import to_wire
from rpc_names import trainers
from scoreboard import Scoreboard, Work

param_server = None  # the one ParameterServer of this process


def make_parameter_server(args):
    """Make this process's ParameterServer, from its own command line, and return it.  Before RPC begins."""
    global param_server
    param_server = ParameterServer(args)
    return param_server


def get_parameter_server():
    """Return this process's ParameterServer.  Reads only: needs no lock.  (The tutorial's makes it, on demand.)"""
    return param_server


class ParameterServer(nn.Module):
    """The network, its one optimizer, and the lock that keeps trainers from changing weights under each other.

    The tutorial's version fails with two trainers: "one of the variables needed for gradient computation has been
    modified by an inplace operation": between a trainer's forward and its backward, another trainer's optimizer step
    changes the weights in place. So each forward works on a *snapshot*, a clone of the weights, which nobody changes.
    Cloning is an operation that autograd records: backward passes through it and arrives at the real parameters.
    """

    def __init__(self, args):
        super().__init__()
        self.seed = args.seed
        self.drop = not args.no_dropout
        self.input_device, _ = devices_of(args.num_gpus)
        torch.manual_seed(args.seed)
        self.model = Net(num_gpus=args.num_gpus)
        # Held while weights are read or changed, never while a gradient is computed, nor while an RPC is waited for.
        self.lock = threading.Lock()
        self.optimizer = optim.SGD(self.model.parameters(), lr=args.lr, momentum=args.momentum)
        # functional_call puts a snapshot into a module for the time of a call. In one module for all RPC threads they
        # would take each other's weights out again: no error, and a model that never learns. So each trainer has layers
        # of its own, and as it waits for each answer, no two threads use them at once. They have no memory for weights.
        layers = copy.deepcopy(self.model).to("meta")
        self.layers_of = {trainer: copy.deepcopy(layers) for trainer in trainers(args)}
        self.work_of = {}  # trainer -> the Work that it has sent forward, and that no step was made of yet
        self.scoreboard = Scoreboard(args, self)

    # ---------------------------------------------------------------------- called by the trainers, over RPC

    def forward(self, trainer, inp):
        """Return log-probabilities (B, 10) for images (B, 1, 28, 28), on a consistent snapshot of the weights.

        May be called by all trainers at once: the snapshot is taken under the lock; all else is the caller's own.
        """
        epoch, batch = self.scoreboard.batch_of(trainer)
        dropout_key = (self.seed, "dropout", epoch, batch) if self.drop else None
        with self.lock:
            snapshot = {name: param.clone() for name, param in self.model.named_parameters()}
            version = self.scoreboard.updates
        self.work_of[trainer] = Work(trainer, version, images=len(inp), batches=1)
        output = functional_call(self.layers_of[trainer], snapshot, (inp.to(self.input_device), dropout_key))
        return to_wire(output)

    def get_param_rrefs(self):
        """Return an RRef to each parameter, for DistributedOptimizer.  Reads only: needs no lock."""
        return [rpc.RRef(param) for param in self.model.parameters()]

    def get_scoreboard(self):
        """Return an RRef to the job's Scoreboard.  Reads only: needs no lock."""
        return rpc.RRef(self.scoreboard)

    def apply_gradients(self, trainer):
        """Change the weights by the gradients that DistributedOptimizer has laid at them.  Called by ServerSGD."""
        with self.lock:
            try:
                self.scoreboard.batch_of(trainer)  # refuses a trainer that was lost
                self.verify_gradients(trainer)
                self.optimizer.step()
            finally:  # back to None: a gradient that does not arrive next time is noticed, not used a second time
                self.optimizer.zero_grad()
            checkpoint_due = self.scoreboard.count_update([self.work_of.pop(trainer)])
            if checkpoint_due:
                state = self.capture()  # copied under the lock, at this update; written later, outside it
                self.scoreboard.save_soon(lambda: state)

    def verify_gradients(self, trainer):
        """The tutorial's assert that gradients came back; there, all of them cross the wire for it: 10 MB a step."""
        for name, param in self.model.named_parameters():
            if param.grad is None:
                raise RuntimeError(f"trainer_{trainer}'s backward pass brought no gradient for {name}")
            check_finite(param.grad.sum(), f"sum of trainer_{trainer}'s gradient for {name}", self.scoreboard.updates)

    # ---------------------------------------------------------------------- called by the Scoreboard, on rank 0

    def start_assignments(self, lr):
        """Set the learning rate.  All trainers are waiting: needs no lock."""
        self.optimizer.param_groups[0]["lr"] = lr

    def forget(self, trainer):
        """Strike a trainer that is lost off the living: when this returns, none of its steps is under way any more."""
        with self.lock:
            self.scoreboard.living.remove(trainer)

    def capture(self):
        """Return a copy of what a checkpoint needs of this server.  Under the lock, or while all trainers wait."""
        weights = {name: param.to("cpu", copy=True) for name, param in self.model.state_dict().items()}
        states = self.optimizer.state.values()  # empty without momentum
        return {"model": weights, "momentum": [state["momentum_buffer"].to("cpu", copy=True) for state in states]}

    def restore(self, state):
        """Go on from what capture() returned."""
        self.model.load_state_dict(state["model"])
        if state["momentum"]:
            for param, momentum in zip(self.model.parameters(), state["momentum"], strict=True):
                self.optimizer.state[param]["momentum_buffer"] = momentum.to(param.device)


class ServerSGD:
    """What each trainer's DistributedOptimizer makes on the server: a handle on the server's one SGD.

    DistributedOptimizer(optim.SGD, ...) would make an SGD per trainer: separate momentum for the same weights, and a
    step that does not take the lock under which snapshots are cloned. It takes any class with such a constructor.
    """

    def __init__(self, params, trainer):
        self.server, self.trainer = get_parameter_server(), trainer

    def step(self):
        """Called when the trainer calls DistributedOptimizer.step, one at a time: torch holds a lock of its own."""
        self.server.apply_gradients(self.trainer)
