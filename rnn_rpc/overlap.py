"""Mode `overlap`: `loss`, but in two halves of the streams, so that both processes work at the same time.

While the decoder computes the loss of the first half, the LSTM computes the second. The backward pass does the same
without further code: in the graph neither half depends on the other, so the decoder of one half and the LSTM of the
other go backward at the same time. Streams do not depend on each other, so the result is that of `loss`, and nothing
is stale. The server runs the two calls on two RPC threads, which only read its parameters.

Shapes: T = time steps, B = streams (b = those of one part), L = layers, E = embedding size, H = hidden size.
"""

import torch

import loss

PARTS = 2  # more were slower: each part adds a gradient of V x H numbers to a sum


class RNNModel(loss.RNNModel):  # in the trainer
    def loss(self, input_TB, target_TB, hidden):
        emb_TBE = self.emb_table_rref.rpc_sync().forward(input_TB.cpu()).to(self.device)
        # A trap: if the first call through an RRef is asynchronous, torch first asks the owner for the object's type,
        # and another thread then makes the call, outside of this autograd context: no error, and no gradients. Here
        # it is not the first call, because parameter_rrefs has made a synchronous one.
        decoder = self.decoder_rref.rpc_async()
        losses = []  # a Future for each part
        next_hidden = []
        # A chunk is a view. contiguous() copies it: cuDNN's LSTM refuses a view as its hidden state, and RPC would send
        # the whole storage behind it.
        cut = [tensor.chunk(PARTS, dim=1) for tensor in (emb_TBE, target_TB, *hidden)]
        for emb_TbE, target_Tb, h_LbH, c_LbH in zip(*cut, strict=True):
            output_TbH, next_hidden_LbH = self.rnn(emb_TbE, (h_LbH.contiguous(), c_LbH.contiguous()))
            losses.append(decoder.loss(output_TbH.cpu(), target_Tb.contiguous().cpu()))
            next_hidden.append(next_hidden_LbH)
        h_LBH, c_LBH = (torch.cat(parts, dim=1) for parts in zip(*next_hidden, strict=True))
        return sum(future.wait().to(self.device) for future in losses), (h_LBH, c_LBH)
