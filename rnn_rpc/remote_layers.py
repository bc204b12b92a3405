"""The two layers that live on a parameter server, and what the trainer may ask of the process that owns them.

Runs on `ps` (or `ps0` and `ps1`): the trainer creates the layers there with rpc.remote and calls their methods.  A
server has no loop and no code of its own: RPC threads run what is called here.

Shapes: T = time steps, B = streams, E = embedding size, H = hidden size, V = vocabulary size.
"""

import torch
import torch.distributed.autograd as dist_autograd
import torch.nn.functional as F
from torch import nn
from torch.distributed.rpc import RRef

from glue.placement import to_wire
from glue.seeds import seed_for


class RemoteLayer(nn.Module):
    """What both layers need because their caller is another process.

    Thread-safety: nothing here takes a lock.  There is one trainer, and it never has a forward or backward pass under
    way while it steps the optimizer, changes the mode, or loads a state; passes among themselves only read.
    """

    device = torch.device("cpu")  # where this process has its tensors: its own main.py says so, not the caller

    def parameter_rrefs(self):
        """Return one RRef per parameter, for DistributedOptimizer.  The RRefs travel, the parameters stay."""
        return [RRef(parameter) for parameter in self.parameters()]

    def set_training(self, training):
        """Switch dropout (and gradients) on or off here: the trainer's own train() and eval() end at the process
        boundary.  Not simply train(): that returns the module, and RPC would send a copy of it back."""
        self.train(training)

    def state(self):
        """Return the parameters for a checkpoint: name -> CPU tensor."""
        return {name: value.cpu() for name, value in self.state_dict().items()}

    def load_state(self, state):
        """Put checkpointed parameters in place (into the same tensors: the optimizer knows them by identity)."""
        self.load_state_dict(state)


class EmbeddingTable(RemoteLayer):
    """Token ids -> vectors.  Source: tutorial part 2, EmbeddingTable."""

    def __init__(self, ntoken, ninp, dropout, seed):
        super().__init__()
        self.drop = KeyedDropout(dropout, seed)
        self.encoder = nn.Embedding(ntoken, ninp)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        self.to(self.device)

    def forward(self, input_TB, draw=0):
        """Look up (T, B) int64 ids: return (T, B, E).  `draw` names the dropout mask.  May run concurrently."""
        # The trainer's torch.no_grad() does not reach this process either: without a training pass, build no graph.
        with torch.set_grad_enabled(self.training):
            return to_wire(self.drop(self.encoder(input_TB.to(self.device)), draw))


class Decoder(RemoteLayer):
    """Hidden vectors -> a score per word of the vocabulary.  Source: tutorial part 2, Decoder."""

    def __init__(self, ntoken, nhid, dropout, seed):
        super().__init__()
        self.drop = KeyedDropout(dropout, seed)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.decoder.bias)
        self.to(self.device)

    def forward(self, output_TBH, draw=0):
        """Return the logits (T, B, V) of (T, B, H): V / H times as many bytes to send back.  May run concurrently."""
        with torch.set_grad_enabled(self.training):
            return to_wire(self._decode(output_TBH, draw))

    def loss(self, output_TBH, target_TB, draw=0, first=0):
        """Return the cross entropy of (T, B, H) against (T, B) ids, *summed* over T * B: the logits stay here.

        A sum, so that the losses of several chunks of one batch simply add up; `first` says which stream of the batch
        is the first of this chunk.  May run concurrently.
        """
        with torch.set_grad_enabled(self.training):
            return to_wire(summed_cross_entropy(self._decode(output_TBH, draw, first), target_TB.to(self.device)))

    def _decode(self, output_TBH, draw, first=0):
        return self.decoder(self.drop(output_TBH.to(self.device), draw, first))


class KeyedDropout(nn.Module):
    """Dropout whose mask depends on a key that the caller gives, not on who called first.

    nn.Dropout draws from the process's one default generator, which all RPC threads share: with two calls under way
    the masks would change from run to run.  The same key gives the same mask, on every thread and after a restart; and
    on a GPU too, since it is always drawn on the CPU.
    """

    def __init__(self, p, seed):
        super().__init__()
        self.p, self.seed = p, seed

    def forward(self, x_TBH, draw, first=0):
        """Return x with a fraction p of its elements zeroed, and the others scaled up; x itself in eval mode.

        `first` is the number of x's first stream in the batch: a part of the batch gets its part of the batch's mask.
        """
        if not self.training or self.p == 0:
            return x_TBH
        steps, streams, size = x_TBH.shape
        generator = torch.Generator().manual_seed(seed_for(self.seed, draw))
        # Drawn stream by stream, so that what a stream gets does not depend on how many streams come after it.
        keep_BTH = torch.empty(first + streams, steps, size, dtype=x_TBH.dtype)
        keep_BTH.bernoulli_(1 - self.p, generator=generator)
        keep_TBH = keep_BTH[first:].transpose(0, 1)
        return x_TBH * keep_TBH.to(x_TBH.device) / (1 - self.p)


def summed_cross_entropy(logits_TBV, target_TB):
    """Return the cross entropy in nats, summed over T * B predictions; the classes are the logits' *last* axis."""
    return F.cross_entropy(logits_TBV.flatten(0, 1), target_TB.flatten(), reduction="sum")


# Asked of each owner of parameters by the trainer, which is one itself.  The gradients of an iteration live in its
# autograd context, on the process that owns the parameter, and get_gradients gives the tensors themselves, not copies.
# No lock: the trainer asks one thing at a time of one context.


def gradient_norm(context_id):
    """Return the L2 norm of all gradients that this process holds in the context."""
    return torch.nn.utils.get_total_norm(list(dist_autograd.get_gradients(context_id).values())).item()


def scale_gradients(context_id, factor):
    """Multiply all gradients that this process holds in the context, in place: opt.step(context_id) reads the same."""
    for gradient in dist_autograd.get_gradients(context_id).values():
        gradient.mul_(factor)


def set_learning_rate(optimizer_rref, lr):
    """Set it here: DistributedOptimizer has no param_groups, the torch.optim optimizer that it made here does."""
    for group in optimizer_rref.local_value().optim.param_groups:
        group["lr"] = lr


def optimizer_state(optimizer_rref):
    """Return the state_dict of the optimizer on this owner, its tensors on the CPU."""
    packed = optimizer_rref.local_value().optim.state_dict()
    packed["state"] = {
        index: {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        for index, state in packed["state"].items()
    }
    return packed


def load_optimizer_state(optimizer_rref, state):
    """Put a checkpointed state_dict in place (torch.optim moves the tensors to each parameter's device)."""
    optimizer_rref.local_value().optim.load_state_dict(state)
