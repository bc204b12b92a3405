"""Dropout whose masks depend on the number of the training step, and an LSTM that uses it.

Runs in the trainer process and on the servers.  Without --dropout nothing here changes a number: KeyedLSTM is then
torch's nn.LSTM, and KeyedDropout does nothing.

Shapes: T = time steps, B = streams, L = layers, E = size of what goes in, H = hidden size.
"""

import torch
from torch import nn

from glue.tensors import dropout_mask, seed_for


class KeyedDropout(nn.Module):
    """Dropout with the same mask for the same step, on every thread, every device, and after a restart.

    nn.Dropout draws from the process's one default generator, which all RPC threads share: with two calls under way
    the masks would change from run to run.
    """

    def __init__(self, p, seed):
        super().__init__()
        self.p = p
        self.seed = seed

    def forward(self, x_TBH, step, first_stream=0):
        """Return x with a fraction p of its elements zeroed, and the others scaled up; x itself in eval mode.

        `first_stream` is the number of x's first stream in the batch: a part of the batch gets its part of the mask.
        """
        if not self.training or self.p == 0:
            return x_TBH
        time_steps, streams, size = x_TBH.shape
        # Drawn stream by stream, so that what a stream gets does not depend on how many streams come after it.
        shape_BTH = (first_stream + streams, time_steps, size)
        mask_BTH = dropout_mask(shape_BTH, self.p, self.seed, step, dtype=x_TBH.dtype)
        mask_TBH = mask_BTH[first_stream:].transpose(0, 1)
        return x_TBH * mask_TBH.to(x_TBH.device)


class KeyedLSTM(nn.Module):
    """An nn.LSTM of several layers, with KeyedDropout between them.

    nn.LSTM's own dropout takes the next numbers of the process's default generator in each call.  Mode `overlap` calls
    the LSTM once for each micro-batch, so with that dropout it would have other masks than the other modes.
    """

    def __init__(self, ninp, nhid, nlayers, dropout, seed):
        super().__init__()
        self.hidden_size = nhid
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.LSTM(nhid if layer > 0 else ninp, nhid) for layer in range(nlayers))
        self.drops = nn.ModuleList(KeyedDropout(dropout, seed_for(seed, layer)) for layer in range(1, nlayers))

    def forward(self, x_TBE, hidden, step=0, first_stream=0):
        """(T, B, E), hidden -> (T, B, H), hidden.  `step` and `first_stream`: as KeyedDropout takes them."""
        h_LBH, c_LBH = hidden
        last_h = []
        last_c = []
        output = x_TBE  # and then (T, B, H), of one layer after the other
        for layer, lstm in enumerate(self.layers):
            if layer > 0:
                output = self.drops[layer - 1](output, step, first_stream)
            output, (h_1BH, c_1BH) = lstm(output, (h_LBH[layer : layer + 1], c_LBH[layer : layer + 1]))
            last_h.append(h_1BH)
            last_c.append(c_1BH)
        return output, (torch.cat(last_h), torch.cat(last_c))
