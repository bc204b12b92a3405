"""Mode `replica`: the server sends its weights to the trainers, which compute gradients with copies of the network.

This does not extend remote.py but is another pattern, so read it by itself, in the order of a step:
ParameterServer.run_batches (rank 0), Trainer.gradient (every other rank), ParameterServer.update (rank 0). No trainer
waits for another one. Modes `bounded`, `sync` and `overlap` are this one with one idea more each.
The forward and the backward pass are local, so there is no distributed autograd and no DistributedOptimizer. A message
is as large as the weights. (In mode `remote` it is as large as a batch.)
Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014. (There, the trainers
call the server.)

trainer is a trainer's rank, an int. Shapes: P weights in the whole network (1,199,882), joined into one tensor.
"""

import collections

from glue.open_calls import OpenCalls
from glue.training import check_finite, seed_for

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import optim
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from counts import Counts, Origin
from data import Batches, load_digits
from net import Net


class ParameterServer:  # in server1, on its main thread: so it needs no lock
    """The weights, the SGD that updates them, and the calls to the trainers."""

    TRAINER_THREADS = 1  # RPC threads of a trainer

    def __init__(self, plan, devices, folders, bar):
        """`devices`, `folders`: where each rank computes, and reads its data. `bar`: a progress bar of images."""
        self.plan = plan
        self.counts = Counts(bar)
        torch.set_num_threads(1)  # its updates are short, and a second thread would take a core from the trainers
        self.model, self.weights_P, self.optimizer = make_model(plan, devices[0])
        # remote() does not wait: all trainers read their images at the same time.
        # timeout=0: no time limit, here and below.
        self.trainers = {
            rank: rpc.remote(rank, Trainer, args=(plan, folders[rank], devices[rank]), timeout=0)
            for rank in range(1, plan.world_size)
        }
        self.done = dict.fromkeys(self.trainers, 0)  # how many batches each of them has done
        self.calls = OpenCalls()  # with --on_lost continue, it gives up the calls to a lost trainer

    def run_batches(self, epoch, batches, report):
        """Whoever has answered gets the newest weights and the next batch. `batches`: their numbers."""
        todo = collections.deque(batches)
        self.deal(todo, epoch)
        for trainer, (batch, version), answer in self.calls.answers():  # also to the calls that deal() adds here
            with torch.profiler.record_function("step"):  # for torch's profiler and tools/rpctrace
                if answer is None:  # the trainer is lost, so another one does its batch
                    todo.appendleft(batch)
                else:
                    gradient_P, images, loss = answer
                    self.update(gradient_P, [Origin(batch, trainer, version, images)])
                    self.report_loss(trainer, batch, loss, report)
                    self.done[trainer] += 1
                self.deal(todo, epoch)

    def deal(self, todo, epoch):
        """Send the trainers that are ready the newest weights, and a batch each."""
        while todo and (ready := self.ready()):
            trainer, batch = ready[0], todo.popleft()
            future = self.trainers[trainer].rpc_async(timeout=0).gradient(self.weights(), epoch, batch)
            self.calls.add(trainer, future, asked=(batch, self.counts.updates))

    def ready(self):
        """Return the trainers that may get a batch now."""
        return self.calls.idle(self.trainers)

    def weights(self):
        """Return the weights on the CPU. A copy, because an update would change them while RPC still sends them."""
        return self.weights_P.to("cpu", copy=True)

    def update(self, gradient_P, made_of):
        """Change the weights by a gradient. `made_of`: the batches behind it, as for Counts.add_update."""
        check_finite(gradient_P.sum(), "sum of the gradient", self.counts.updates + 1)
        self.weights_P.grad = gradient_P.to(self.weights_P.device)
        self.optimizer.step()
        self.counts.add_update(*made_of)

    def report_loss(self, trainer, batch, loss, report):
        """Print and record the loss of a batch, if it is one of those that --log_interval asks for."""
        if self.done[trainer] % self.plan.log_interval == 0:
            report.say(f"Rank {trainer} training batch {batch} loss {loss}")
            report.scalar("loss", loss, self.counts.updates)


class Trainer:  # in a trainer, whose one RPC thread computes one batch at a time: so it needs no lock
    """Computes gradients with a copy of the network."""

    def __init__(self, plan, data_dir, device):
        self.seed = plan.seed
        self.device = torch.device(device)
        digits = load_digits(plan.dataset, data_dir, plan.seed, train=True)
        self.batches = Batches(*digits, plan.batch_size, plan.seed, self.device)
        self.net = Net().to(self.device).train(not plan.no_dropout)

    def count_images(self):
        return len(self.batches.images)

    def gradient(self, weights_P, epoch, batch):
        """Return (gradient (P,), number of images, loss) of one batch, computed with these weights."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has a current device of its own
        # The parameters become views of the tensor: no copy.
        vector_to_parameters(weights_P.to(self.device), self.net.parameters())
        data, target = self.batches.get(epoch, batch)
        # With a seed for each batch, dropout is the same in every run, whoever computes it.
        torch.manual_seed(seed_for(self.seed, "dropout", epoch, batch))
        loss = F.nll_loss(self.net(data), target)
        gradients = torch.autograd.grad(loss, list(self.net.parameters()))
        # Tensors travel on the CPU: RPC's CUDA support is beta.
        return torch.cat([gradient.reshape(-1) for gradient in gradients]).cpu(), len(target), loss.item()


def make_model(plan, device):
    """Return (model, all its weights (P,), the SGD that updates them)."""
    torch.manual_seed(seed_for(plan.seed, "net"))
    model = Net().to(device)
    # The model's parameters become views of one tensor, which the optimizer changes in place.
    weights_P = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(weights_P, model.parameters())
    return model, weights_P, optim.SGD([weights_P], lr=plan.lr, momentum=plan.momentum)
