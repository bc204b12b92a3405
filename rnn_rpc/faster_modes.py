"""The modes `loss` and `overlap`: faster ways to compute what RNNModel.loss_on_trainer computes.

Runs in the trainer process.  Each function takes the RNNModel, token ids (T, B), target ids (T, B), the hidden state,
and the number of the training step.  It returns the loss summed over T * B (a scalar), and the next hidden state.

Shapes: T = time steps, B = streams (b = streams of one micro-batch), L = layers, E = embedding size, H = hidden size.
"""

import torch

# Mode `overlap`: the parts into which a batch is cut.  More parts were slower, because each part adds a gradient of
# V x H numbers to a sum.
MICRO_BATCHES = 2


def loss_on_server(model, input_TB, target_TB, hidden, step=0):
    """Mode `loss`: the trainer sends the targets to the decoder, and the decoder returns one number, the loss."""
    emb_TBE = model.emb_table_rref.rpc_sync().forward(input_TB.cpu(), step).to(model.device)
    output_TBH, next_hidden = model.rnn(emb_TBE, hidden, step)
    loss = model.decoder_rref.rpc_sync().loss(output_TBH.cpu(), target_TB.cpu(), step)
    return loss.to(model.device), next_hidden


def loss_overlapped(model, input_TB, target_TB, hidden, step=0):
    """Mode `overlap`: mode `loss` in micro-batches, which are groups of streams, so that both processes work at once.

    While the decoder computes the loss of the first micro-batch, the LSTM computes the second.  After that, the
    server's RPC threads can also use the core on which the LSTM ran.

    The backward pass needs no code of its own.  In the graph, no micro-batch depends on another one, so the decoder of
    one micro-batch and the LSTM of another run their backward passes at the same time.

    The result is exact: streams do not depend on each other, and only the order in which gradients are added differs.
    """
    emb_TBE = model.emb_table_rref.rpc_sync().forward(input_TB.cpu(), step).to(model.device)
    # All micro-batches have the same number of streams, but the last one may have fewer.
    h_LBH, c_LBH = hidden
    emb_parts = emb_TBE.chunk(MICRO_BATCHES, dim=1)
    target_parts = target_TB.chunk(MICRO_BATCHES, dim=1)
    h_parts = h_LBH.chunk(MICRO_BATCHES, dim=1)
    c_parts = c_LBH.chunk(MICRO_BATCHES, dim=1)

    losses = []  # a Future for each micro-batch
    next_h_parts = []
    next_c_parts = []
    first_stream = 0
    for emb_TbE, target_Tb, h_LbH, c_LbH in zip(emb_parts, target_parts, h_parts, c_parts, strict=True):
        hidden_LbH = (h_LbH.contiguous(), c_LbH.contiguous())
        output_TbH, (next_h_LbH, next_c_LbH) = model.rnn(emb_TbE, hidden_LbH, step, first_stream)
        # A trap: the first rpc_async() of an RRef asks the owner for the object's type.  Another thread then makes the
        # call, outside of this autograd context.  The call below is not the first one: RNNModel.parameter_rrefs has
        # made a synchronous call through this RRef, so the type has already been received.
        decoder = model.decoder_rref.rpc_async()
        losses.append(decoder.loss(output_TbH.cpu(), target_Tb.contiguous().cpu(), step, first_stream))
        next_h_parts.append(next_h_LbH)
        next_c_parts.append(next_c_LbH)
        first_stream += target_Tb.shape[1]
    loss = sum(future.wait().to(model.device) for future in losses)
    return loss, (torch.cat(next_h_parts, dim=1), torch.cat(next_c_parts, dim=1))
