"""Mode `remote`, the server's side: the tutorial's ParameterServer, made safe for any number of trainers.

Runs in the process `parameter_server`, called by the trainers over RPC: forward, backward and the optimizer's step of
every trainer happen here, several at a time, each in an RPC thread.

Shapes: B images in a batch.
"""

import contextlib
import copy
import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.func import functional_call

from digits_net import Net, devices_of
from glue.placement import to_wire
from scoreboard import Scoreboard

param_server = None  # the one ParameterServer of this process
global_lock = threading.Lock()  # so that two trainers' first calls do not make two


def get_parameter_server(args):
    """Return this process's ParameterServer, made by the first call.  Source: tutorial, `get_parameter_server`.

    May be called by all trainers at once (locked). The trainers call it through rpc.remote, so that they hold an RRef
    to it; rank 0 calls it too, so that it is the one to say what is wrong with test data or checkpoint.
    """
    global param_server
    with global_lock:
        if param_server is None:
            param_server = ParameterServer(args)
        return param_server


class ParameterServer(nn.Module):
    """The network, its one optimizer, and the lock that keeps trainers from changing weights under each other.

    The tutorial's version fails with two trainers: "one of the variables needed for gradient computation has been
    modified by an inplace operation". Between a trainer's forward and its backward, another trainer's optimizer step
    changes the weights in place; autograd still needs the old ones to compute gradients, notices, and raises.

    So each forward works on a *snapshot*, a clone of the weights, which nobody changes. Cloning is an operation that
    autograd records: backward passes through it and arrives at the real parameters.
    """

    def __init__(self, args):
        super().__init__()
        self.args = args
        torch.manual_seed(args.seed)
        self.model = Net(num_gpus=args.num_gpus, dropout=not args.no_dropout)
        self.devices = devices_of(args.num_gpus)
        # Held while weights are read or changed, never while a gradient is computed.
        self.lock = threading.Lock()
        self.optimizer = optim.SGD(self.model.parameters(), lr=args.lr, momentum=args.momentum)
        self.snapshot_of = {}  # trainer -> (updates when its snapshot was taken, images in its batch, bytes for it)
        self.skeleton = copy.deepcopy(self.model).to("meta")  # the layers without weights: see _own_skeleton
        self.thread = threading.local()
        self.scoreboard = Scoreboard(args, self)

    # ------------------------------------------------------------------------------ called by the trainers, over RPC

    def forward(self, trainer, inp):
        """Return log-probabilities (B, 10) for images (B, 1, 28, 28), on a consistent snapshot of the weights.

        May be called by all trainers at once: the snapshot is taken under the lock; all else is the caller's own.
        """
        inp = inp.to(self.devices[0])
        with self._exclusive():
            snapshot = {name: param.clone() for name, param in self.model.named_parameters()}
            self.snapshot_of[trainer] = (self.scoreboard.updates, len(inp), inp.nbytes + 2 * len(inp) * 10 * 4)
        out = functional_call(self._own_skeleton(), snapshot, (inp,))
        return to_wire(out.to(self.devices[0]))

    def get_param_rrefs(self):
        """Return an RRef to each parameter, for DistributedOptimizer.  Reads only: needs no lock."""
        return [rpc.RRef(param) for param in self.model.parameters()]

    def get_scoreboard(self):
        """Return an RRef to the job's Scoreboard.  Reads only: needs no lock."""
        return rpc.RRef(self.scoreboard)

    # ------------------------------------------------------------------------------- called by ServerSGD, see below

    def apply_gradients(self, trainer):
        """Change the weights by the gradients that DistributedOptimizer has laid at the parameters."""
        with self._exclusive():
            self._verify_gradients(trainer)
            self.optimizer.step()
            # Back to None, so that a gradient which does not arrive next time is noticed, not used a second time.
            self.optimizer.zero_grad(set_to_none=True)
            read_at, images, num_bytes = self.snapshot_of.pop(trainer)
            staleness = self.scoreboard.updates - read_at
            self.scoreboard.count_update([(trainer, staleness, images, 1)], num_bytes)

    def _verify_gradients(self, trainer):
        """The tutorial's assert that gradients came back; there, all of them cross the wire for it: 10 MB a step."""
        for name, param in self.model.named_parameters():
            if param.grad is None:
                raise RuntimeError(f"trainer_{trainer}'s backward pass brought no gradient for {name}")
            if not torch.isfinite(param.grad.sum()):
                raise ValueError(f"trainer_{trainer}'s gradient for {name} is not finite: try a lower --lr")

    # --------------------------------------------------------------------------- called by the Scoreboard, on rank 0

    def start_epoch(self, epoch):
        """Set the learning rate of an epoch (from 0).  All trainers are waiting: needs no lock."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.args, epoch)

    def net_to_evaluate(self):
        return self.model

    def capture(self):
        """Return what a checkpoint needs of this server.  Called under the lock, or while all trainers wait."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    # ------------------------------------------------------------------------------------------------------- helpers

    def _own_skeleton(self):
        """Return a copy of the layers for this RPC thread alone.

        functional_call lends the snapshot to a module for the time of the call, by swapping its parameters. On one
        module shared by threads, they would swap each other's: no error, and a model that never learns.
        """
        if not hasattr(self.thread, "skeleton"):
            self.thread.skeleton = copy.deepcopy(self.skeleton)
        return self.thread.skeleton

    @contextlib.contextmanager
    def _exclusive(self):
        """The lock, on GPUs too: work queued there by one thread is finished before another thread's may begin."""
        with self.lock:
            yield
            for device in set(self.devices):
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()


class ServerSGD:
    """What each trainer's DistributedOptimizer makes on the server: a handle on the server's one SGD.

    DistributedOptimizer(optim.SGD, ...) would make a separate SGD per trainer: separate momentum for the same
    weights, and a step that does not take the lock under which snapshots are cloned, so that a snapshot could be half
    before and half after it. DistributedOptimizer takes any class that has this constructor and step().
    """

    def __init__(self, params, args, trainer):
        self.server, self.trainer = get_parameter_server(args), trainer

    def step(self):
        """Called when the trainer calls DistributedOptimizer.step, one at a time: torch holds a lock of its own."""
        self.server.apply_gradients(self.trainer)


def learning_rate(args, epoch):
    """Return --lr, divided by 10 after every --lr_step epochs."""
    return args.lr * 0.1 ** (epoch // args.lr_step) if args.lr_step else args.lr
