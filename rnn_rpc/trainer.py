"""The training step over all processes; also evaluation, text generation, and the state for a checkpoint.

Runs in the trainer process (rank 1), called from run_trainer in main.py.  The servers only serve its calls.

Shapes: T = time steps (--bptt), B = streams (--batch_size), V = vocabulary size.
"""

import math

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

import owners
from glue.report import check_finite
from glue.seeds import seed_for
from model import MODES

WARM_UP_STEPS = 5  # training steps that are not timed, because they open connections and use memory for the first time
ANNEALING = 4.0  # divides the learning rate when held-out perplexity does not fall, as in torch's word language model


class Trainer:
    """The model, its optimizer, and the progress of training.

    No method of this class is called remotely.  The only random numbers of training are dropout masks, and these depend
    on the number of the training step (see KeyedDropout).  So a checkpoint needs no state of a random generator, of any
    process: the number `step` is enough.
    """

    def __init__(self, model, mode, optimizer, lr, clip, seed):
        """Make an optimizer in each process that owns parameters of the model."""
        self.model = model
        self.loss = MODES[mode]
        self.first_lr = lr
        self.annealed = 0  # how often the learning rate was divided
        self.clip = clip
        self.seed = seed
        # This makes a torch.optim optimizer in each process, for the parameters that the process owns.
        self.opt = DistributedOptimizer(owners.OPTIMIZERS[optimizer], model.parameter_rrefs(), lr=lr)
        self.optimizer_rrefs = {rref.owner_name(): rref for rref in self.opt.remote_optimizers}
        self.step = 0  # training steps so far
        self.epoch = 0  # epochs so far
        self.heldout = math.inf  # held-out perplexity after the last epoch
        self.best = math.inf  # the lowest so far
        self.worst_loss = math.log(1000 * model.ntoken)  # in nats: a perplexity of 1000 V; a blind guess has V

    def train_step(self, data_TB, target_TB, hidden):
        """Run one training step over all processes: forward pass, backward pass, clipping, optimizer step.

        Return the summed loss in nats, and the next hidden state.  There is no zero_grad(): each context has gradients
        of its own in every process, and they are deleted when it ends.

        Raises UserError if training has diverged: the loss is not finite, or far worse than that of a blind guess.
        Source: tutorial part 2, the body of the loop in run_trainer.
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
        # The next batch continues from this state, but without its graph.  With the graph, its backward pass would
        # continue into the graphs of all earlier batches, whose contexts have ended.
        return summed_loss, (h_LBH.detach(), c_LBH.detach())

    def clip_gradients(self, context_id):
        """Scale all gradients in all processes, so that their common norm is at most `clip`; return the old norm.

        torch's clip_grad_norm_ would see the LSTM's parameters only.  And it would read their .grad, which has the
        gradients of the previous training step, because backward() writes into the context.  So every owner returns
        the norm of its own gradients.  If the common norm is too large, every owner gets the same factor to scale them.
        """
        futures = [rpc.rpc_async(owner, owners.gradient_norm, args=(context_id,)) for owner in self.optimizer_rrefs]
        norm = math.sqrt(sum(future.wait() ** 2 for future in futures))
        factor = self.clip / (norm + 1e-6)
        if factor < 1:
            args = (context_id, factor)
            futures = [rpc.rpc_async(owner, owners.scale_gradients, args=args) for owner in self.optimizer_rrefs]
            torch.futures.wait_all(futures)
        return norm

    # The methods below are not part of a training step.  They run after an epoch, at the end, or for a checkpoint.

    def evaluate(self, batches, num_streams):
        """Return the mean loss in nats per token of held-out batches, with dropout off in every process."""
        self.model.eval()
        hidden = self.model.init_hidden(num_streams)
        summed_loss = 0.0
        tokens = 0
        with torch.no_grad():  # for this process; the servers build no graph because eval() has reached them
            for data_TB, target_TB in batches:
                loss, hidden = self.loss(self.model, data_TB, target_TB, hidden)
                summed_loss += loss.item()
                tokens += target_TB.numel()
        return check_finite(summed_loss / tokens, "held-out loss", self.step, at_most=self.worst_loss)

    def anneal(self, heldout_perplexity):
        """Divide the learning rate by four if held-out perplexity is not the lowest so far.

        Source: the word language model of pytorch/examples.
        """
        self.heldout = heldout_perplexity
        if heldout_perplexity < self.best:
            self.best = heldout_perplexity
        else:
            self.annealed += 1
            self.set_learning_rate()

    @property
    def lr(self):
        """The learning rate: --lr, divided by four as often as it was annealed."""
        return self.first_lr / ANNEALING**self.annealed

    def set_learning_rate(self):
        """Set the learning rate of the optimizer in every process."""
        for owner, optimizer_rref in self.optimizer_rrefs.items():
            rpc.rpc_sync(owner, owners.set_learning_rate, args=(optimizer_rref, self.lr))

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

    def state(self):
        """Return everything that a resumed run needs: a dict of tensors, numbers and lists."""
        optimizers = {}
        for owner, optimizer_rref in self.optimizer_rrefs.items():
            optimizers[owner] = rpc.rpc_sync(owner, owners.optimizer_state, args=(optimizer_rref,))
        return {
            "model": self.model.state(),
            "optimizers": optimizers,
            "epoch": self.epoch,
            "step": self.step,
            "annealed": self.annealed,
            "heldout": self.heldout,
            "best": self.best,
        }

    def load_state(self, state):
        """Continue from a `state` that state() has returned, in any mode.  --lr may have another value."""
        self.model.load_state(state["model"])
        for owner, optimizer_rref in self.optimizer_rrefs.items():
            rpc.rpc_sync(owner, owners.load_optimizer_state, args=(optimizer_rref, state["optimizers"][owner]))
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.heldout = state["heldout"]
        self.best = state["best"]
        self.annealed = state["annealed"]
        self.set_learning_rate()
