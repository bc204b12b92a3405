"""The modes `loss` and `overlap`: faster ways to compute what RNNModel.loss_on_trainer computes.

Runs in the trainer process.  Each function takes the RNNModel, (T, B) ids, (T, B) targets, the hidden state and the
number of the training step, and returns the loss summed over T * B (a scalar), and the next hidden state.

Shapes: T = time steps, B = streams (b: those of one micro-batch), L = layers, E = embedding size, H = hidden size.
"""

import torch

from glue.tensors import to_wire

MICRO_BATCHES = 2  # mode `overlap`: in flight at once.  More were slower: each costs a gradient of V x H to add up


def loss_on_server(model, input_TB, target_TB, hidden, step=0):
    """Mode `loss`: the targets travel to the decoder instead, and one number comes back."""
    emb_TBE = model.emb_table_rref.rpc_sync().forward(to_wire(input_TB), step).to(model.device)
    output_TBH, next_hidden = model.rnn(emb_TBE, hidden, step)
    loss = model.decoder_rref.rpc_sync().loss(to_wire(output_TBH), to_wire(target_TB), step)
    return loss.to(model.device), next_hidden


def loss_overlapped(model, input_TB, target_TB, hidden, step=0):
    """Mode `overlap`: `loss` in micro-batches of some streams each, so that both processes work at once.

    Exact: streams know nothing of each other until their gradients are added up, so only the order of sums differs.
    While the decoder works on the first micro-batch, the LSTM runs the next; then the decoder's RPC threads take
    the idle core as well.  The backward pass needs no code of its own: it follows the same graph, in which the
    micro-batches are side by side, so one's LSTM and the other's decoder run backward at the same time.
    """
    emb_TBE = model.emb_table_rref.rpc_sync().forward(to_wire(input_TB), step).to(model.device)
    # All micro-batches have as many streams, but the last one may have fewer.
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
        # Trap: an RRef's first rpc_async() asks the owner for the object's type, and the call then goes on in another
        # thread, which knows nothing of this autograd context.  RNNModel.parameter_rrefs has made a synchronous call
        # on this RRef in this process, so the type is known.
        decoder = model.decoder_rref.rpc_async()
        losses.append(decoder.loss(to_wire(output_TbH), to_wire(target_Tb.contiguous()), step, first_stream))
        next_h_parts.append(next_h_LbH)
        next_c_parts.append(next_c_LbH)
        first_stream += target_Tb.shape[1]
    loss = sum(future.wait().to(model.device) for future in losses)
    return loss, (torch.cat(next_h_parts, dim=1), torch.cat(next_c_parts, dim=1))
