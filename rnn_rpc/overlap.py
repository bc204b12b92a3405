"""Mode `overlap`: `loss`, but in two halves of the streams, so that both processes work at the same time.

While the decoder computes the loss of the first half, the LSTM computes the second. The backward pass does the same
without further code. It begins at the sum of both losses, so it enters both halves on the server at once, and neither
depends on the other in the graph: the decoder of one half and the LSTM of the other go backward at the same time.
Streams do not depend on each other either, so the result is that of `loss`, and nothing is stale.

Shapes: T = time steps, B = streams (b = those of one part), L = layers, E = embedding size, H = hidden size.
"""

import torch

import loss

Decoder = loss.Decoder
PARTS = 2  # more are slower: each part makes a gradient of V x H numbers, and all must be added up


class RNNModel(loss.RNNModel):  # in the trainer
    def summed_loss(self, input_TB, target_TB, hidden):
        emb_TBE = self.emb_table_rref.rpc_sync().forward(input_TB.cpu()).to(self.device)
        # Safe only because parameter_rrefs has made a synchronous call through this RRef: a *first* call by rpc_async
        # would be outside of this autograd context, without gradients or an error (docs/CONCEPTS.md, RRefs).
        decoder = self.decoder_rref.rpc_async()
        losses = []  # a Future for each part
        next_hidden = []
        # A chunk is a view. contiguous() copies it where that matters: cuDNN's LSTM refuses a view as its hidden state
        # (not as its input), and RPC may send the whole storage behind the targets.
        cut = [tensor.chunk(PARTS, dim=1) for tensor in (emb_TBE, target_TB, *hidden)]
        for emb_TbE, target_Tb, h_LbH, c_LbH in zip(*cut, strict=True):
            output_TbH, next_hidden_LbH = self.rnn(emb_TbE, (h_LbH.contiguous(), c_LbH.contiguous()))
            losses.append(decoder.summed_loss(output_TbH.cpu(), target_Tb.contiguous().cpu()))
            next_hidden.append(next_hidden_LbH)
        h_LBH, c_LBH = (torch.cat(parts, dim=1) for parts in zip(*next_hidden, strict=True))
        return sum(future.wait().to(self.device) for future in losses), (h_LBH, c_LBH)
