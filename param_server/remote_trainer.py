"""Mode `remote`, the trainer's side: the tutorial's TrainerNet and training loop.

Runs in each trainer's process (`trainer_1`, `trainer_2`, ...).  A trainer has the data and the training loop.  The
network and its optimizer are on the server.

Shapes: B images in a batch.
"""

import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from glue.report import Meter, check_finite
from remote_server import ServerSGD, get_parameter_server


class TrainerNet(nn.Module):
    """A network whose forward pass is a remote call.  Source: tutorial, class `TrainerNet`."""

    def __init__(self, rank, device):
        super().__init__()
        self.rank = rank
        self.device = device
        # An RRef is a reference to an object in another process. The object lives as long as there is an RRef to it.
        self.param_server_rref = rpc.remote("parameter_server", get_parameter_server)

    def get_global_param_rrefs(self):
        """Return an RRef to each parameter to optimize.  All of them are on the server: this module has none."""
        return self.param_server_rref.rpc_sync().get_param_rrefs()

    def forward(self, x):
        """Return the server's log-probabilities (B, 10) for images (B, 1, 28, 28)."""
        # RPC's CUDA support is beta, so tensors travel on the CPU.  Autograd follows cpu() and to().
        output = self.param_server_rref.rpc_sync().forward(self.rank, x.cpu())
        return output.to(self.device)


def run_training_loop(rank, args, batches, device):
    """Train until the Scoreboard has no more assignments.  Source: tutorial, `run_training_loop`."""
    meter = Meter()
    net = TrainerNet(rank, device)
    opt = DistributedOptimizer(ServerSGD, net.get_global_param_rrefs(), trainer=rank)
    # This RRef was the result of an RPC. It can be used like any other RRef.
    scoreboard_rref = net.param_server_rref.rpc_sync().get_scoreboard()

    # timeout=0: no time limit, because this call waits for the slowest trainer and for the evaluation.
    while assignment := scoreboard_rref.rpc_sync(timeout=0).next_assignment(rank, batches.per_epoch):
        for step, (batch, data, target) in enumerate(batches.of(assignment.epoch, assignment.batches)):
            # In each process that takes part, the context keeps this batch's gradients apart from those of all other
            # batches. So no zero_grad is needed, and the gradients of different trainers are not added up.
            with meter.step(), dist_autograd.context() as cid:
                model_output = net(data)
                loss = F.nll_loss(model_output, target)
                check_finite(loss.item(), "loss", batch)
                dist_autograd.backward(cid, [loss])  # continues on the server, behind the RPC
                opt.step(cid)
            if step % args.log_interval == 0:
                scoreboard_rref.rpc_sync().record_loss(rank, batch, loss.item())
