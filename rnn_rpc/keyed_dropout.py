"""Dropout whose masks depend on the number of the training step, and an LSTM that uses it.

Runs in the trainer process and on the servers.  Without --dropout, KeyedLSTM computes the same as torch's nn.LSTM, and
KeyedDropout returns its input.

Shapes: T = time steps, B = streams, L = layers, E = input size, H = hidden size.
"""

import torch
from torch import nn

from glue.seeds import dropout_mask, seed_for


class KeyedDropout(nn.Module):
    """Dropout that has the same mask for the same training step, on every thread and device, and after a restart.

    nn.Dropout draws its masks from the default generator of the process, which all RPC threads share.  If two calls run
    at the same time, chance decides which of them draws first, and the masks differ from run to run.
    """

    def __init__(self, p, seed):
        super().__init__()
        self.p = p
        self.seed = seed

    def forward(self, x_TBH, step, first_stream=0):
        """Return x with a fraction p of its elements set to zero and the others scaled up; in evaluation, return x.

        `step` is the number of the training step.  `first_stream` is the number of x's first stream in the batch, so
        that a part of the batch gets the same part of the mask.
        """
        if not self.training or self.p == 0:
            return x_TBH
        time_steps, streams, size = x_TBH.shape
        # The streams are the first axis, so that the mask of a stream does not depend on the number of later streams.
        shape_BTH = (first_stream + streams, time_steps, size)
        mask_BTH = dropout_mask(shape_BTH, self.p, self.seed, step, dtype=x_TBH.dtype)
        mask_TBH = mask_BTH[first_stream:].transpose(0, 1)
        return x_TBH * mask_TBH.to(x_TBH.device)


class KeyedLSTM(nn.Module):
    """An LSTM of several layers, with KeyedDropout between them.  Each layer is an nn.LSTM of one layer.

    The dropout of nn.LSTM itself draws new numbers from the default generator in each call.  Mode `overlap` calls the
    LSTM once for each micro-batch.  With that dropout, its masks would differ from those of the other modes.
    """

    def __init__(self, ninp, nhid, nlayers, dropout, seed):
        super().__init__()
        self.hidden_size = nhid
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.LSTM(nhid if layer > 0 else ninp, nhid) for layer in range(nlayers))
        self.drops = nn.ModuleList(KeyedDropout(dropout, seed_for(seed, layer)) for layer in range(1, nlayers))

    def forward(self, x_TBE, hidden, step=0, first_stream=0):
        """Return the output (T, B, H) and the next hidden state, from an input (T, B, E) and a hidden state.

        `step` and `first_stream` are those of KeyedDropout.forward.
        """
        h_LBH, c_LBH = hidden
        last_h = []
        last_c = []
        output = x_TBE  # after each layer (T, B, H)
        for layer, lstm in enumerate(self.layers):
            if layer > 0:
                output = self.drops[layer - 1](output, step, first_stream)
            output, (h_1BH, c_1BH) = lstm(output, (h_LBH[layer : layer + 1], c_LBH[layer : layer + 1]))
            last_h.append(h_1BH)
            last_c.append(c_1BH)
        return output, (torch.cat(last_h), torch.cat(last_c))
