"""Trains the language model, and tells how well it did.

Runs in the trainer process (rank 1), called from main.py's run_trainer. The servers only answer what it asks of them.

Shapes: T = time steps (--bptt), B = streams (--batch_size), V = vocabulary size.
"""

import math
import time

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import optim
from torch.distributed.optim import DistributedOptimizer

import remote_layers
from corpus import batches
from glue import measure, placement, seeds
from model import RNNModel

WARM_UP_STEPS = 5  # the first steps open connections and touch fresh memory; they are not timed
ANNEALING = 4.0  # the recipe divides the learning rate by this when held-out perplexity does not fall


class Trainer:
    """The training loop's state: model, optimizer, and how far it has come.

    Nothing here is called remotely. Everything random in training is keyed by the step number (see KeyedDropout), so
    `step` *is* the random state: that is all a checkpoint has to know to repeat it, on every worker.
    """

    def __init__(self, args, job, names, vocabulary):
        """Builds model and optimizer on all workers; `names[rank]` are their RPC names."""
        self.args, self.vocabulary = args, vocabulary
        servers = [name for name in names if name != "trainer"]
        self.devices = {name: placement.device_of(rank, args) for rank, name in enumerate(names)}
        self.model = RNNModel(
            servers,
            len(vocabulary),
            args.embedding_dim,
            args.hidden_dim,
            args.num_layers,
            args.dropout,
            seed=args.seed,
            devices=self.devices,
            mode=args.mode,
        )
        self.lr = args.lr
        # One torch.optim optimizer on each owner, over the parameters that live there.
        optimizer_class = {"sgd": optim.SGD, "adam": optim.Adam}[args.optimizer]
        self.opt = DistributedOptimizer(optimizer_class, self.model.parameter_rrefs(), lr=self.lr)
        self.owners = {rref.owner_name(): rref for rref in self.opt.remote_optimizers}
        self.epoch = self.step = 0
        self.heldout = self.best = math.inf  # held-out perplexity: after the last epoch, and the lowest so far
        self.seconds, self.tokens, self.wire_bytes, self.rpc_calls = 0.0, 0, 0, 0
        self.steps_here = 0

    def train_epoch(self, train_SB, result, bar):
        """One pass over the text; returns the mean loss in nats per token."""
        self.model.train()
        hidden = self.model.init_hidden(self.args.batch_size)
        total = count = 0
        since_log, tokens_since_log = 0.0, 0
        bytes_before, calls_before, mark = measure.wire_bytes(), self.model.rpc_calls, time.perf_counter()
        for input_TB, targets_TB in batches(train_SB, self.args.bptt):
            # The batch goes on where the last one ended, but its gradient stops here: without this, each backward pass
            # would walk back through the graphs of all batches before, also through those that were freed.
            hidden = tuple(state.detach() for state in hidden)
            loss, hidden = self.train_step(input_TB, targets_TB, hidden)
            loss, tokens = loss.item(), targets_TB.numel()
            total, count = total + loss, count + tokens
            since_log, tokens_since_log = since_log + loss, tokens_since_log + tokens
            if self.step % self.args.log_interval == 0:
                result.scalar("loss/train", since_log / tokens_since_log, self.step)
                bar.set_postfix_str(f"epoch {self.epoch + 1}, loss {since_log / tokens_since_log:.3f}", refresh=False)
                since_log, tokens_since_log = 0.0, 0
            bar.update()
            now = time.perf_counter()
            if self.steps_here > WARM_UP_STEPS:
                self.seconds, self.tokens = self.seconds + now - mark, self.tokens + tokens
            mark = now
        self.wire_bytes += measure.wire_bytes() - bytes_before
        self.rpc_calls += self.model.rpc_calls - calls_before
        self.epoch += 1
        return total / count

    def train_step(self, input_TB, targets_TB, hidden):
        """Forward, backward, clip, step, over all workers; returns the summed loss and the new hidden state.

        Source: tutorial part 2, the body of run_trainer's loop. There is no zero_grad(): each context has gradients of
        its own, on every worker, and they go when it ends.
        """
        torch.manual_seed(seeds.seed_for(self.args.seed, "dropout", self.step))  # for the dropout between LSTM layers
        with dist_autograd.context() as context_id:
            loss, hidden = self.model.loss(input_TB, targets_TB, hidden, draw=self.step)
            dist_autograd.backward(context_id, [loss / targets_TB.numel()])
            if self.args.clip:
                self.clip_gradients(context_id)
            self.opt.step(context_id)
            self.rpc_calls += len(self.owners)  # step asks each owner once
            if self.model.device.type == "cuda":  # the next forward pass runs on other streams than this step
                for owner in self.owners:
                    rpc.rpc_sync(owner, remote_layers.synchronize, args=(str(self.devices[owner]),))
        self.step += 1
        self.steps_here += 1
        return loss.detach(), hidden

    def clip_gradients(self, context_id):
        """Scale all gradients, wherever they are, so that their common norm is at most --clip; returns the norm.

        clip_grad_norm_ would see the LSTM's parameters only, and parameter.grad is empty even there: every owner
        reports the norm of what it holds, and is told the one factor that is right for all.
        """
        norms = [rpc.rpc_async(owner, remote_layers.gradient_norm, args=(context_id,)) for owner in self.owners]
        norm = math.sqrt(sum(future.wait() ** 2 for future in norms))
        self.rpc_calls += len(norms)
        factor = self.args.clip / (norm + 1e-6)
        if factor < 1:
            torch.futures.wait_all(
                [
                    rpc.rpc_async(owner, remote_layers.scale_gradients, args=(context_id, factor))
                    for owner in self.owners
                ]
            )
            self.rpc_calls += len(self.owners)
        return norm

    def evaluate(self, stream_SB):
        """Mean loss in nats per token on a held-out stream, dropout off on every worker."""
        self.model.eval()
        hidden = self.model.init_hidden(stream_SB.shape[1])
        total = count = 0
        with torch.no_grad():  # this process; the servers build no graphs in eval mode
            for input_TB, targets_TB in batches(stream_SB, self.args.bptt):
                loss, hidden = self.model.loss(input_TB, targets_TB, hidden)
                total, count = total + loss.item(), count + targets_TB.numel()
        return total / count

    def anneal(self, heldout_perplexity):
        """The recipe's schedule: when held-out perplexity has not fallen, go on with a quarter of the learning rate."""
        self.heldout = heldout_perplexity
        if heldout_perplexity < self.best:
            self.best = heldout_perplexity
        else:
            self.set_learning_rate(self.lr / ANNEALING)

    def set_learning_rate(self, lr):
        self.lr = lr
        for owner, optimizer_rref in self.owners.items():
            rpc.rpc_sync(owner, remote_layers.set_learning_rate, args=(optimizer_rref, lr))

    def generate(self, length):
        """Sample `length` token ids, one step at a time: two RPCs each."""
        self.model.eval()
        generator = torch.Generator().manual_seed(seeds.seed_for(self.args.seed, "generate"))
        hidden, ids = self.model.init_hidden(1), []
        token_11 = torch.randint(len(self.vocabulary), (1, 1), generator=generator)
        with torch.no_grad():
            for _ in range(length):
                logits_11V, hidden = self.model(token_11, hidden)
                token_11 = torch.multinomial(logits_11V[0].softmax(-1).cpu(), 1, generator=generator)
                ids.append(token_11.item())
        return ids

    # ---- checkpoint and result --------------------------------------------------------------------------------------

    def state(self):
        """Everything that another run needs to go on: a dict of tensors, numbers, strings, lists."""
        optimizers = {
            owner: rpc.rpc_sync(owner, remote_layers.optimizer_state, args=(rref,))
            for owner, rref in self.owners.items()
        }
        return {
            "made_with": self._made_with(),
            "vocabulary": self.vocabulary,
            "model": self.model.state(),
            "optimizers": optimizers,
            "epoch": self.epoch,
            "step": self.step,
            "lr": self.lr,
            "heldout": self.heldout,
            "best": self.best,
        }

    def load_state(self, state):
        """Go on from a checkpoint, made in any mode. Raises ValueError if it does not fit this run."""
        for flag, value in self._made_with().items():
            if state["made_with"].get(flag) != value:
                made_with = state["made_with"].get(flag)
                raise ValueError(f"{self.args.checkpoint} was made with --{flag} {made_with}, not {value}")
        if state["vocabulary"] != self.vocabulary:
            raise ValueError(f"{self.args.checkpoint} was made from a text with another vocabulary")
        self.model.load_state(state["model"])
        for owner, optimizer_rref in self.owners.items():
            rpc.rpc_sync(owner, remote_layers.load_optimizer_state, args=(optimizer_rref, state["optimizers"][owner]))
        self.epoch, self.step = state["epoch"], state["step"]
        self.heldout, self.best = state["heldout"], state["best"]
        self.set_learning_rate(state["lr"])

    def _made_with(self):
        flags = ("embedding_dim", "hidden_dim", "num_layers", "optimizer", "world_size")  # world_size: who owns what
        return {flag: getattr(self.args, flag) for flag in flags}

    def figures(self):
        """What the training steps of this run cost (evaluation left out)."""
        steps, tcp = max(1, self.steps_here), self.args.transport == "tcp"
        return {
            "tokens_per_second": round(self.tokens / self.seconds, 1) if self.seconds else None,
            # Sent and received by the trainer, which every message of a step comes from or goes to. Counted by the
            # kernel, which sees it only with --transport tcp: the other transports hand tensors over in memory.
            "wire_bytes_per_step": round(self.wire_bytes / steps) if tcp else None,
            "rpc_calls": self.rpc_calls,
            "rpc_calls_per_step": round(self.rpc_calls / steps, 2),
        }
