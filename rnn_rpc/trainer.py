"""The training step over all processes; also evaluation, text generation, and the state for a checkpoint.

Read train_step first. The functions below the class run in every process that owns parameters, the trainer included.

Shapes: T = time steps (--bptt), B = streams (--batch_size), L = layers, H = hidden size, V = vocabulary size.
"""

import math

from glue.training import check_finite, seed_for

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import optim
from torch.distributed.optim import DistributedOptimizer

WARM_UP_STEPS = 5  # training steps that are not timed, because they open connections and use memory for the first time


class SGD(optim.SGD):
    """Does what optim.SGD does. For that class itself, DistributedOptimizer would take a functional version, which has
    no state_dict and prints a warning (docs/differences/rnn_rpc.md, number 8)."""


class Adam(optim.Adam):
    """As SGD."""


OPTIMIZERS = {"sgd": SGD, "adam": Adam}


class Trainer:  # in the trainer
    """The model, its optimizers, and the progress of training."""

    def __init__(self, model, optimizer, lr, clip, seed):
        self.model = model
        self.clip = clip
        self.seed = seed
        # This makes a torch.optim optimizer in each process, for the parameters that the process owns.
        self.opt = DistributedOptimizer(OPTIMIZERS[optimizer], model.parameter_rrefs(), lr=lr)
        self.optimizer_rrefs = {rref.owner_name(): rref for rref in self.opt.remote_optimizers}
        self.step = 0  # training steps so far
        self.epoch = 0  # epochs so far
        self.heldout = math.inf  # held-out perplexity after the last epoch
        self.worst_loss = math.log(1000 * model.ntoken)  # in nats: a perplexity of 1000 V; a blind guess has V

    def train_step(self, data_TB, target_TB, hidden):
        """Run one training step over all processes; return the summed loss in nats, and the next hidden state.

        Raises UserError if training has diverged: the loss is not finite, or far worse than that of a blind guess.
        Source: tutorial, the body of the loop in run_trainer.
        """
        # No zero_grad(): backward() writes the gradients into this context, and step() puts them into .grad, where they
        # replace those of the last step.
        with dist_autograd.context() as context_id:
            loss, (h_LBH, c_LBH) = self.model.summed_loss(data_TB, target_TB, hidden)
            dist_autograd.backward(context_id, [loss / target_TB.numel()])  # the mean loss, as in the tutorial
            if self.clip:
                self.clip_gradients(context_id)
            self.opt.step(context_id)
        self.step += 1
        summed_loss = loss.item()
        check_finite(summed_loss / target_TB.numel(), "loss", self.step, at_most=self.worst_loss)
        # The next batch continues from this state, but without its graph, whose context has ended.
        return summed_loss, (h_LBH.detach(), c_LBH.detach())

    def clip_gradients(self, context_id):
        """Scale all gradients in all processes, so that their common norm is at most `clip`.

        torch's clip_grad_norm_ would see the LSTM's parameters only, and would read their .grad, where the gradients of
        the previous training step still are.
        """
        futures = [rpc.rpc_async(owner, gradient_norm, args=(context_id,)) for owner in self.optimizer_rrefs]
        norm = math.sqrt(sum(future.wait() ** 2 for future in futures))
        factor = self.clip / (norm + 1e-6)
        if factor < 1:
            args = (context_id, factor)
            futures = [rpc.rpc_async(owner, scale_gradients, args=args) for owner in self.optimizer_rrefs]
            torch.futures.wait_all(futures)

    # The methods below are not part of a training step. They run after an epoch, at the end, or for a checkpoint.

    def evaluate(self, batches, num_streams):
        """Return the mean loss in nats per token of held-out batches, with dropout off in every process."""
        self.model.eval()
        hidden = self.model.init_hidden(num_streams)
        summed_loss = 0.0
        tokens = 0
        with torch.no_grad():  # for this process; on the servers, eval() has turned autograd off
            for data_TB, target_TB in batches:
                loss, hidden = self.model.summed_loss(data_TB, target_TB, hidden)
                summed_loss += loss.item()
                tokens += target_TB.numel()
        return check_finite(summed_loss / tokens, "held-out loss", self.step, at_most=self.worst_loss)

    def generate(self, length):
        """Return `length` token ids that the model generates one after the other, with two RPCs for each."""
        self.model.eval()
        generator = torch.Generator().manual_seed(seed_for(self.seed, "generate"))
        hidden = self.model.init_hidden(1)
        token_11 = torch.randint(self.model.ntoken, (1, 1), generator=generator)
        ids = []
        with torch.no_grad():
            for _ in range(length):
                logits_11V, hidden = self.model(token_11, hidden)
                token_11 = torch.multinomial(logits_11V[0].softmax(-1).cpu(), 1, generator=generator)
                ids.append(token_11.item())
        return ids

    def state_dict(self):
        """Return everything that a resumed run needs: a dict of tensors and numbers."""
        optimizers = {
            owner: rpc.rpc_sync(owner, optimizer_state, args=(rref,)) for owner, rref in self.optimizer_rrefs.items()
        }
        progress = {"epoch": self.epoch, "step": self.step, "heldout": self.heldout}
        return {"model": self.model.state_dict(), "optimizers": optimizers, **progress}

    def load_state_dict(self, state):
        """Continue from a state of any mode."""
        self.model.load_state_dict(state["model"])
        for owner, rref in self.optimizer_rrefs.items():
            rpc.rpc_sync(owner, load_optimizer_state, args=(rref, state["optimizers"][owner]))
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.heldout = state["heldout"]


# These functions need no lock: the trainer waits for each before it calls the same process again.


def gradient_norm(context_id):
    """Return the L2 norm of all gradients that this process has in the context."""
    return torch.nn.utils.get_total_norm(list(dist_autograd.get_gradients(context_id).values())).item()


def scale_gradients(context_id, factor):
    """Multiply in place all gradients that this process has in the context; opt.step(context_id) uses the result."""
    for gradient in dist_autograd.get_gradients(context_id).values():  # the tensors themselves, not copies
        gradient.mul_(factor)


# DistributedOptimizer has no state_dict. Its RRefs lead to an object of torch in each process that owns parameters, and
# that object's attribute `optim` is the optimizer.


def optimizer_state(optimizer_rref):
    """Return the state of this process's optimizer for each of its parameters, with CPU tensors."""
    state = optimizer_rref.local_value().optim.state_dict()["state"]
    return {index: {name: value.cpu() for name, value in values.items()} for index, values in state.items()}


def load_optimizer_state(optimizer_rref, state):
    """Load what optimizer_state has returned. The learning rate stays that of --lr."""
    optimizer = optimizer_rref.local_value().optim
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
