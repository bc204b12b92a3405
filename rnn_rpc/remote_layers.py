"""The two layers that live on a parameter server, and what the trainer may ask of the process that owns them.

Runs on `ps` (or `ps0` and `ps1`): the trainer creates the layers there with rpc.remote and calls their methods. A
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

    Thread-safety: nothing here takes a lock. There is one trainer, and it never has a forward or backward pass under
    way while it steps the optimizer, changes the mode, or loads a state; passes among themselves only read.
    """

    def __init__(self, device):
        super().__init__()
        self.device = torch.device(device)

    def parameter_rrefs(self):
        """One RRef per parameter, for DistributedOptimizer. The RRefs travel, the parameters stay."""
        return [RRef(parameter) for parameter in self.parameters()]

    def set_training(self, training):
        """Switch dropout (and gradients) on or off here: the trainer's own model.train() and model.eval() end at the
        process boundary. Not simply train(): that returns the module, and RPC would send a copy of it back."""
        self.train(training)

    def state(self):
        """The parameters for a checkpoint: name -> CPU tensor."""
        return {name: value.cpu() for name, value in self.state_dict().items()}

    def load_state(self, state):
        """Put checkpointed parameters in place (into the same tensors: the optimizer knows them by identity)."""
        self.load_state_dict(state)

    # `--wire cpu`: tensors cross the process boundary on the CPU. These two lines and their twins in RNNModel are the
    # whole difference; on a CPU-only job, and with `--wire direct` between GPUs, they return the tensor as it is.

    def _received(self, tensor):
        return tensor.to(self.device)

    def _to_send(self, tensor):
        return to_wire(tensor)


class EmbeddingTable(RemoteLayer):
    """Token ids -> vectors. Source: tutorial part 2, EmbeddingTable."""

    def __init__(self, ntoken, ninp, dropout, seed, device="cpu"):
        super().__init__(device)
        self.drop = KeyedDropout(dropout, seed)
        self.encoder = nn.Embedding(ntoken, ninp)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        self.to(self.device)

    def forward(self, input_TB, draw=0):
        """(T, B) int64 ids -> (T, B, E). `draw` names the dropout mask, see KeyedDropout. May run concurrently."""
        # The trainer's torch.no_grad() does not reach this process either: without a training pass, build no graph.
        with torch.set_grad_enabled(self.training):
            return self._to_send(self.drop(self.encoder(self._received(input_TB)), draw))


class Decoder(RemoteLayer):
    """Hidden vectors -> a score per word of the vocabulary. Source: tutorial part 2, Decoder."""

    def __init__(self, ntoken, nhid, dropout, seed, device="cpu"):
        super().__init__(device)
        self.drop = KeyedDropout(dropout, seed)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.decoder.bias)
        self.to(self.device)

    def forward(self, output_TBH, draw=0):
        """(T, B, H) -> logits (T, B, V): V / H times as many bytes to send back. May run concurrently."""
        with torch.set_grad_enabled(self.training):
            return self._to_send(self._decode(output_TBH, draw))

    def loss(self, output_TBH, targets_TB, draw=0):
        """(T, B, H), (T, B) ids -> cross entropy *summed* over T * B (a scalar): the logits never leave this process.

        A sum, so that the losses of several chunks of one batch simply add up. May run concurrently.
        """
        with torch.set_grad_enabled(self.training):
            return self._to_send(summed_cross_entropy(self._decode(output_TBH, draw), self._received(targets_TB)))

    def _decode(self, output_TBH, draw):
        return self.decoder(self.drop(self._received(output_TBH), draw))


class KeyedDropout(nn.Module):
    """Dropout whose mask depends on a key that the caller gives, not on who called first.

    nn.Dropout draws from the process's one default generator, which all RPC threads share: with two calls under way
    the masks would change from run to run. The same key gives the same mask, on every thread and after a restart.
    """

    def __init__(self, p, seed):
        super().__init__()
        self.p, self.seed = p, seed

    def forward(self, x, draw):
        if not self.training or self.p == 0:
            return x
        generator = torch.Generator(x.device).manual_seed(seed_for(self.seed, draw))
        keep = torch.empty_like(x, requires_grad=False).bernoulli_(1 - self.p, generator=generator)
        return x * keep / (1 - self.p)


def summed_cross_entropy(logits_TBV, targets_TB):
    """Cross entropy in nats, summed over all T * B predictions; the classes are the *last* axis of the logits."""
    return F.cross_entropy(logits_TBV.flatten(0, 1), targets_TB.flatten(), reduction="sum")


# ---------------------------------------------------------------------------------------------------------------------
# Asked of each owner by the trainer. The gradients of one iteration live in its autograd context, on the process that
# owns the parameter; parameter.grad plays no part. No lock: the trainer asks one thing at a time of one context.


def gradient_norm(context_id):
    """The L2 norm of all gradients that this process holds in the context."""
    gradients = dist_autograd.get_gradients(context_id)
    return torch.nn.utils.get_total_norm(list(gradients.values())).item()


def scale_gradients(context_id, factor):
    """Multiply all gradients that this process holds in the context, in place: opt.step(context_id) reads the same."""
    gradients = dist_autograd.get_gradients(context_id)
    for gradient in gradients.values():
        gradient.mul_(factor)
    for device in {gradient.device for gradient in gradients.values()}:
        synchronize(device)


def synchronize(device):
    """On a GPU, wait until all that was launched here has ended. Each RPC runs on a CUDA stream of its own, and torch
    makes one wait for another only through tensors that travel between them: an update in place does not travel."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def set_learning_rate(optimizer_rref, lr):
    """DistributedOptimizer has no param_groups; the torch.optim optimizer that it made on this owner does."""
    for group in optimizer_rref.local_value().optim.param_groups:
        group["lr"] = lr


def optimizer_state(optimizer_rref):
    """state_dict of the optimizer on this owner, its tensors on the CPU."""
    return _on_cpu(optimizer_rref.local_value().optim.state_dict())


def load_optimizer_state(optimizer_rref, state):
    """Put a checkpointed state_dict in place (torch.optim moves the tensors to each parameter's device)."""
    optimizer_rref.local_value().optim.load_state_dict(state)


def _on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value
