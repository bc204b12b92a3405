"""Trains the language model, and tells how well it did.

Runs in the trainer process (rank 1), called from main.py's run_trainer.  The servers only answer what it asks of them.

Shapes: T = time steps (--bptt), B = streams (--batch_size), V = vocabulary size.
"""

import math

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

import owners
from glue.report import check_finite
from glue.tensors import seed_for
from model import MODES

WARM_UP_STEPS = 5  # the first steps open connections and touch fresh memory; they are not timed
ANNEALING = 4.0  # the recipe divides the learning rate by this when held-out perplexity does not fall


class Trainer:
    """The training loop's state: model, optimizer, and how far it has come.

    Nothing here is called remotely.  Everything random in training is keyed by the step number (see KeyedDropout), so
    `step` *is* the random state: that is all a checkpoint has to know to repeat it, on every worker.
    """

    def __init__(self, model, mode, optimizer, lr, clip, seed):
        """Make an optimizer on each owner of the model's parameters."""
        self.model = model
        self.loss = MODES[mode]
        self.lr = lr
        self.clip = clip
        self.seed = seed
        # One torch.optim optimizer on each owner, over the parameters that live there.
        self.opt = DistributedOptimizer(owners.OPTIMIZERS[optimizer], model.parameter_rrefs(), lr=lr)
        self.optimizer_rrefs = {rref.owner_name(): rref for rref in self.opt.remote_optimizers}
        self.step = 0  # training steps so far
        self.epoch = 0  # epochs so far
        self.heldout = math.inf  # held-out perplexity after the last epoch
        self.best = math.inf  # the lowest so far
        self.worst_loss = math.log(1000 * model.ntoken)  # in nats; beyond it a blind guess is a thousand times as good

    def train_step(self, data_TB, target_TB, hidden):
        """Forward, backward, clip, step, over all workers; return the summed loss in nats, and the next hidden state.

        Raises PermanentError if training has diverged: the loss is no number, or far worse than a blind guess.
        Source: tutorial part 2, the body of run_trainer's loop.  There is no zero_grad(): each context has gradients of
        its own, on every worker, and they go when it ends.
        """
        with dist_autograd.context() as context_id:
            loss, (h_LBH, c_LBH) = self.loss(self.model, data_TB, target_TB, hidden, self.step)
            dist_autograd.backward(context_id, [loss / target_TB.numel()])
            if self.clip:
                self.clip_gradients(context_id)
            self.opt.step(context_id)
        self.step += 1
        summed_loss = loss.item()
        check_finite(summed_loss / target_TB.numel(), "loss", self.step, at_most=self.worst_loss)
        # The next batch goes on from this state without its graph: else its backward pass would walk back through the
        # graphs of all batches before, whose contexts have ended.
        return summed_loss, (h_LBH.detach(), c_LBH.detach())

    def clip_gradients(self, context_id):
        """Scale all gradients, wherever they are, so that their common norm is at most `clip`; return the norm.

        clip_grad_norm_ would see the LSTM's parameters only, and in their .grad what the last step left there: backward
        writes into the context.  So every owner reports the norm of what it holds, and is told the one factor for all.
        """
        futures = [rpc.rpc_async(owner, owners.gradient_norm, args=(context_id,)) for owner in self.optimizer_rrefs]
        norm = math.sqrt(sum(future.wait() ** 2 for future in futures))
        factor = self.clip / (norm + 1e-6)
        if factor < 1:
            args = (context_id, factor)
            futures = [rpc.rpc_async(owner, owners.scale_gradients, args=args) for owner in self.optimizer_rrefs]
            torch.futures.wait_all(futures)
        return norm

    # The rest is not part of a training step: it is done after an epoch, at the end, or for a checkpoint.

    def evaluate(self, batches, num_streams):
        """Return the mean loss in nats per token on held-out batches, dropout off on every worker."""
        self.model.eval()
        hidden = self.model.init_hidden(num_streams)
        summed_loss = 0.0
        tokens = 0
        with torch.no_grad():  # this process; the servers build no graphs in eval mode
            for data_TB, target_TB in batches:
                loss, hidden = self.loss(self.model, data_TB, target_TB, hidden)
                summed_loss += loss.item()
                tokens += target_TB.numel()
        return check_finite(summed_loss / tokens, "held-out loss", self.step, at_most=self.worst_loss)

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
        for owner, optimizer_rref in self.optimizer_rrefs.items():
            rpc.rpc_sync(owner, owners.set_learning_rate, args=(optimizer_rref, lr))

    def generate(self, length):
        """Sample `length` token ids, one step at a time: two RPCs each."""
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

    def state(self):
        """Return everything that another run needs to go on: a dict of tensors, numbers, lists."""
        optimizers = {}
        for owner, optimizer_rref in self.optimizer_rrefs.items():
            optimizers[owner] = rpc.rpc_sync(owner, owners.optimizer_state, args=(optimizer_rref,))
        return {
            "model": self.model.state(),
            "optimizers": optimizers,
            "epoch": self.epoch,
            "step": self.step,
            "lr": self.lr,
            "heldout": self.heldout,
            "best": self.best,
        }

    def load_state(self, state):
        """Go on from what state() returned, in any mode."""
        self.model.load_state(state["model"])
        for owner, optimizer_rref in self.optimizer_rrefs.items():
            rpc.rpc_sync(owner, owners.load_optimizer_state, args=(optimizer_rref, state["optimizers"][owner]))
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.heldout = state["heldout"]
        self.best = state["best"]
        self.set_learning_rate(state["lr"])
