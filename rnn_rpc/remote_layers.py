"""The two layers that a parameter server owns: the embedding table and the decoder.

Runs on `ps` (or on `ps0` and `ps1`).  The trainer creates the layers with rpc.remote, and calls their methods.  RPC
threads of the server run these calls, so a server needs no loop.

Shapes: T = time steps, B = streams, E = embedding size, H = hidden size, V = vocabulary size.
"""

import torch
import torch.nn.functional as F
from torch import nn

from keyed_dropout import KeyedDropout
from owners import RemoteLayer


class EmbeddingTable(RemoteLayer):
    """A vector for each token id.  Source: tutorial part 2, EmbeddingTable."""

    def __init__(self, ntoken, ninp, dropout, seed):
        super().__init__()
        self.drop = KeyedDropout(dropout, seed)
        self.encoder = nn.Embedding(ntoken, ninp)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        self.to(self.device)

    def forward(self, input_TB, step=0):
        """Return the vectors (T, B, E) of int64 ids (T, B).  `step` is the key of the dropout mask.

        Several calls may run at the same time.
        """
        # The trainer's torch.no_grad() has no effect in this process.  Without this line, an evaluation would build a
        # graph on the server.
        with torch.set_grad_enabled(self.training):
            emb_TBE = self.encoder(input_TB.to(self.device))
            return self.drop(emb_TBE, step).cpu()


class Decoder(RemoteLayer):
    """A score for each word of the vocabulary, from an output of the LSTM.  Source: tutorial part 2, Decoder."""

    def __init__(self, ntoken, nhid, dropout, seed):
        super().__init__()
        self.drop = KeyedDropout(dropout, seed)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.decoder.bias)
        self.to(self.device)

    def forward(self, output_TBH, step=0):
        """Return the logits (T, B, V) of the LSTM's output (T, B, H): V / H times as many bytes as were received.

        Several calls may run at the same time.
        """
        with torch.set_grad_enabled(self.training):
            return self.decode(output_TBH, step).cpu()

    def decode(self, output_TBH, step, first_stream=0):
        """Return the logits (T, B, V) of (T, B, H), on this process's device."""
        return self.decoder(self.drop(output_TBH.to(self.device), step, first_stream))

    def loss(self, output_TBH, target_TB, step=0, first_stream=0):
        """Modes `loss` and `overlap`: return the cross entropy, *summed* over T * B.  The logits are not sent.

        `output_TBH` is the LSTM's output, `target_TB` has the ids of the next tokens.  The result is a sum and not a
        mean, so that the losses of the parts of a batch can be added.  `first_stream` is the number of the first stream
        of this part in the batch.  Several calls may run at the same time.
        """
        with torch.set_grad_enabled(self.training):
            logits_TBV = self.decode(output_TBH, step, first_stream)
            return summed_cross_entropy(logits_TBV, target_TB.to(self.device)).cpu()


def summed_cross_entropy(logits_TBV, target_TB):
    """Return the cross entropy in nats, summed over T * B predictions.  The classes are on the *last* axis."""
    return F.cross_entropy(logits_TBV.flatten(0, 1), target_TB.flatten(), reduction="sum")
