"""The two layers that live on a parameter server.

Runs on `ps` (or `ps0` and `ps1`): the trainer creates the layers there with rpc.remote and calls their methods.  A
server has no loop and no code of its own: RPC threads run what is called here.

Shapes: T = time steps, B = streams, E = embedding size, H = hidden size, V = vocabulary size.
"""

import torch
import torch.nn.functional as F
from torch import nn

from glue.tensors import to_wire
from keyed_dropout import KeyedDropout
from owners import RemoteLayer


class EmbeddingTable(RemoteLayer):
    """Token ids -> vectors.  Source: tutorial part 2, EmbeddingTable."""

    def __init__(self, ntoken, ninp, dropout, seed):
        super().__init__()
        self.drop = KeyedDropout(dropout, seed)
        self.encoder = nn.Embedding(ntoken, ninp)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        self.to(self.device)

    def forward(self, input_TB, step=0):
        """Look up (T, B) int64 ids: return (T, B, E).  `step` is the key of the dropout mask.  May run concurrently."""
        # The trainer's torch.no_grad() does not reach this process either: without a training pass, build no graph.
        with torch.set_grad_enabled(self.training):
            emb_TBE = self.encoder(input_TB.to(self.device))
            return to_wire(self.drop(emb_TBE, step))


class Decoder(RemoteLayer):
    """Hidden vectors -> a score per word of the vocabulary.  Source: tutorial part 2, Decoder."""

    def __init__(self, ntoken, nhid, dropout, seed):
        super().__init__()
        self.drop = KeyedDropout(dropout, seed)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.decoder.bias)
        self.to(self.device)

    def forward(self, output_TBH, step=0):
        """Return the logits (T, B, V) of (T, B, H): V / H times as many bytes to send back.  May run concurrently."""
        with torch.set_grad_enabled(self.training):
            return to_wire(self.decode(output_TBH, step))

    def decode(self, output_TBH, step, first_stream=0):
        """Return the logits on this process's device."""
        return self.decoder(self.drop(output_TBH.to(self.device), step, first_stream))

    def loss(self, output_TBH, target_TB, step=0, first_stream=0):
        """Modes `loss` and `overlap`: return the cross entropy of (T, B, H) against (T, B) ids, *summed* over T * B.

        A sum, so that the losses of several parts of one batch simply add up; `first_stream` is the number of this
        part's first stream in the batch.  The logits stay in this process.  May run concurrently.
        """
        with torch.set_grad_enabled(self.training):
            logits_TBV = self.decode(output_TBH, step, first_stream)
            return to_wire(summed_cross_entropy(logits_TBV, target_TB.to(self.device)))


def summed_cross_entropy(logits_TBV, target_TB):
    """Return the cross entropy in nats, summed over T * B predictions; the classes are the logits' *last* axis."""
    return F.cross_entropy(logits_TBV.flatten(0, 1), target_TB.flatten(), reduction="sum")
