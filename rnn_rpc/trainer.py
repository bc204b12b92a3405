"""Trains the language model, and tells how well it did.

Runs in the trainer process (rank 1), called from main.py's run_trainer.  The servers only answer what it asks of them.

Shapes: T = time steps (--bptt), B = streams (--batch_size), V = vocabulary size.
"""

import math

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import optim
from torch.distributed.optim import DistributedOptimizer

import remote_layers
from glue.report import check_finite
from glue.seeds import seed_for
from model import MODES

OPTIMIZERS = {"sgd": optim.SGD, "adam": optim.Adam}
WARM_UP_STEPS = 5  # the first steps open connections and touch fresh memory; they are not timed
ANNEALING = 4.0  # the recipe divides the learning rate by this when held-out perplexity does not fall


class Trainer:
    """The training loop's state: model, optimizer, and how far it has come.

    Nothing here is called remotely.  Everything random in training is keyed by the step number (see KeyedDropout), so
    `step` *is* the random state: that is all a checkpoint has to know to repeat it, on every worker.
    """

    def __init__(self, model, mode, optimizer, lr, clip, seed):
        """Make an optimizer on each owner of the model's parameters."""
        self.model, self.loss, self.clip, self.seed = model, MODES[mode], clip, seed
        self.lr = lr
        # One torch.optim optimizer on each owner, over the parameters that live there.
        self.opt = DistributedOptimizer(OPTIMIZERS[optimizer], model.parameter_rrefs(), lr=lr)
        self.owners = {rref.owner_name(): rref for rref in self.opt.remote_optimizers}
        self.epoch = self.step = 0
        self.heldout = self.best = math.inf  # held-out perplexity: after the last epoch, and the lowest so far
        self.worst_loss = math.log(1000 * model.ntoken)  # beyond it a blind guess is a thousand times as good

    def train_epoch(self, batches, num_streams):
        """Train on each of `batches`, data and target (T, B); yield (summed loss in nats, tokens) after each step.

        Raises PermanentError at the first loss that is no number, or one that training does not come back from.
        """
        self.model.train()
        hidden = self.model.init_hidden(num_streams)
        for data_TB, target_TB in batches:
            # The batch goes on where the last one ended, but its gradient stops here: without this, each backward pass
            # would walk back through the graphs of all batches before, also through those that were freed.
            hidden = tuple(state.detach() for state in hidden)
            loss, hidden = self.train_step(data_TB, target_TB, hidden)
            loss, tokens = loss.item(), target_TB.numel()
            check_finite(loss / tokens, "loss", self.step, at_most=self.worst_loss)
            yield loss, tokens
        self.epoch += 1

    def train_step(self, data_TB, target_TB, hidden):
        """Forward, backward, clip, step, over all workers; return the summed loss and the new hidden state.

        Source: tutorial part 2, the body of run_trainer's loop.  There is no zero_grad(): each context has gradients of
        its own, on every worker, and they go when it ends.
        """
        with dist_autograd.context() as context_id:
            loss, hidden = self.loss(self.model, data_TB, target_TB, hidden, draw=self.step)
            dist_autograd.backward(context_id, [loss / target_TB.numel()])
            if self.clip:
                self.clip_gradients(context_id)
            self.opt.step(context_id)
        self.step += 1
        return loss.detach(), hidden

    def clip_gradients(self, context_id):
        """Scale all gradients, wherever they are, so that their common norm is at most `clip`; return the norm.

        clip_grad_norm_ would see the LSTM's parameters only, and in their .grad what the last step left there: backward
        writes into the context.  So every owner reports the norm of what it holds, and is told the one factor for all.
        """
        norms = [rpc.rpc_async(owner, remote_layers.gradient_norm, args=(context_id,)) for owner in self.owners]
        norm = math.sqrt(sum(future.wait() ** 2 for future in norms))
        factor = self.clip / (norm + 1e-6)
        if factor < 1:
            scale = remote_layers.scale_gradients
            torch.futures.wait_all([rpc.rpc_async(owner, scale, args=(context_id, factor)) for owner in self.owners])
        return norm

    def evaluate(self, batches, num_streams):
        """Return the mean loss in nats per token on held-out batches, dropout off on every worker."""
        self.model.eval()
        hidden, losses = self.model.init_hidden(num_streams), []
        with torch.no_grad():  # this process; the servers build no graphs in eval mode
            for data_TB, target_TB in batches:
                loss, hidden = self.loss(self.model, data_TB, target_TB, hidden)
                losses.append((loss.item(), target_TB.numel()))
        return check_finite(mean_loss(losses), "held-out loss", self.step, at_most=self.worst_loss)

    def anneal(self, heldout_perplexity):
        """Go on with a quarter of the learning rate when held-out perplexity has not fallen: the recipe's schedule."""
        self.heldout = heldout_perplexity
        if heldout_perplexity < self.best:
            self.best = heldout_perplexity
        else:
            self.set_learning_rate(self.lr / ANNEALING)

    def set_learning_rate(self, lr):
        """Tell every optimizer the new learning rate."""
        self.lr = lr
        for owner, optimizer_rref in self.owners.items():
            rpc.rpc_sync(owner, remote_layers.set_learning_rate, args=(optimizer_rref, lr))

    def generate(self, length):
        """Sample `length` token ids, one step at a time: two RPCs each."""
        self.model.eval()
        generator = torch.Generator().manual_seed(seed_for(self.seed, "generate"))
        hidden, ids = self.model.init_hidden(1), []
        token_11 = torch.randint(self.model.ntoken, (1, 1), generator=generator)
        with torch.no_grad():
            for _ in range(length):
                logits_11V, hidden = self.model(token_11, hidden)
                token_11 = torch.multinomial(logits_11V[0].softmax(-1).cpu(), 1, generator=generator)
                ids.append(token_11.item())
        return ids

    def figures(self):
        """Return what a summary says of it."""
        return {"heldout_perplexity": self.heldout, "epochs": self.epoch, "steps": self.step}

    def state(self):
        """Return everything that another run needs to go on: a dict of tensors, numbers, lists."""
        asked = remote_layers.optimizer_state
        return {
            "model": self.model.state(),
            "optimizers": {owner: rpc.rpc_sync(owner, asked, args=(rref,)) for owner, rref in self.owners.items()},
            "epoch": self.epoch,
            "step": self.step,
            "lr": self.lr,
            "heldout": self.heldout,
            "best": self.best,
        }

    def load_state(self, state):
        """Go on from what state() returned, in any mode."""
        self.model.load_state(state["model"])
        for owner, optimizer_rref in self.owners.items():
            rpc.rpc_sync(owner, remote_layers.load_optimizer_state, args=(optimizer_rref, state["optimizers"][owner]))
        self.epoch, self.step = state["epoch"], state["step"]
        self.heldout, self.best = state["heldout"], state["best"]
        self.set_learning_rate(state["lr"])


def mean_loss(losses):
    """Return the nats per token of some steps, each a pair of summed loss and tokens."""
    return sum(loss for loss, _ in losses) / sum(tokens for _, tokens in losses)
