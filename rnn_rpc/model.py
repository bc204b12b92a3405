"""The language model: an LSTM here, an embedding table and a decoder on parameter servers.

Runs in the trainer process.  Everything that crosses a process boundary in training is in this file and in the few
lines of trainer.py that clip and step.

Shapes: T = time steps, B = streams (b: those of one micro-batch), L = layers, E = embedding size, H = hidden size,
V = vocabulary size.
"""

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.rpc import RRef

from glue.placement import to_wire
from glue.seeds import seed_for
from remote_layers import Decoder, EmbeddingTable, KeyedDropout, summed_cross_entropy

MICRO_BATCHES = 2  # mode `overlap`: in flight at once.  More were slower: each costs a gradient of V x H to add up


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

    def forward(self, x_TBE, hidden, draw=0, first=0):
        """(T, B, E), hidden -> (T, B, H), hidden.  `first` is the number of x's first stream in the batch."""
        h_LBH, c_LBH = hidden
        last_h, last_c = [], []
        for layer, lstm in enumerate(self.layers):
            if layer > 0:
                x_TBE = self.drops[layer - 1](x_TBE, draw, first)
            x_TBE, (h_1BH, c_1BH) = lstm(x_TBE, (h_LBH[layer : layer + 1], c_LBH[layer : layer + 1]))
            last_h.append(h_1BH)
            last_c.append(c_1BH)
        return x_TBE, (torch.cat(last_h), torch.cat(last_c))


class RNNModel(nn.Module):
    """Source: tutorial part 2, RNNModel.

    `ps` names the servers: the first owns the embedding table, the last (often the same one) the decoder.
    """

    def __init__(self, ps, ntoken, ninp, nhid, nlayers, dropout=0.5, *, seed, device="cpu"):
        super().__init__()
        self.ntoken, self.device = ntoken, torch.device(device)
        self.rnn = KeyedLSTM(ninp, nhid, nlayers, dropout, seed_for(seed, "rnn")).to(self.device)
        # remote() returns at once, before the layer is there.  Every layer has a seed of its own: two constructors that
        # run side by side on one server would share its default generator, in an order that nobody knows.
        self.emb_table_rref = rpc.remote(ps[0], EmbeddingTable, args=(ntoken, ninp, dropout, seed_for(seed, "table")))
        self.decoder_rref = rpc.remote(ps[-1], Decoder, args=(ntoken, nhid, dropout, seed_for(seed, "decoder")))

    def forward(self, input_TB, hidden, draw=0):
        """(T, B) ids, hidden -> logits (T, B, V), hidden.  `draw` names this pass's dropout masks, on all workers.

        It reads like a local model: while a distributed autograd context is open, RPC notes each tensor that leaves
        and comes back, and the backward pass follows them.
        """
        emb_TBE = self._look_up(input_TB, draw)
        output_TBH, hidden = self.rnn(emb_TBE, hidden, draw)
        decoded_TBV = self.decoder_rref.rpc_sync().forward(to_wire(output_TBH), draw)
        return decoded_TBV.to(self.device), hidden

    def _look_up(self, input_TB, draw):
        return self.emb_table_rref.rpc_sync().forward(to_wire(input_TB), draw).to(self.device)

    # One method per mode: (T, B) ids, (T, B) targets, hidden -> the loss summed over T * B (a scalar), hidden.

    def loss_here(self, input_TB, target_TB, hidden, draw=0):
        """Mode `logits`, the tutorial's: the scores of all V words come over the wire, the loss is computed here."""
        decoded_TBV, hidden = self(input_TB, hidden, draw)
        return summed_cross_entropy(decoded_TBV, target_TB.to(self.device)), hidden

    def loss_there(self, input_TB, target_TB, hidden, draw=0):
        """Mode `loss`: the targets travel to the decoder instead, and one number comes back."""
        emb_TBE = self._look_up(input_TB, draw)
        output_TBH, hidden = self.rnn(emb_TBE, hidden, draw)
        loss = self.decoder_rref.rpc_sync().loss(to_wire(output_TBH), to_wire(target_TB), draw)
        return loss.to(self.device), hidden

    def loss_overlapped(self, input_TB, target_TB, hidden, draw=0):
        """Mode `overlap`: `loss` in micro-batches of some streams each, so that both processes work at once.

        Exact: streams know nothing of each other until their gradients are added up, so only the order of sums differs.
        While the decoder works on the first micro-batch, the LSTM runs the next; then the decoder's RPC threads take
        the idle core as well.  The backward pass needs no code of its own: it follows the same graph, in which the
        micro-batches are side by side, so one's LSTM and the other's decoder run backward at the same time.
        """
        losses, hiddens, first = [], [], 0
        emb_TBE = self._look_up(input_TB, draw)
        pieces = [tensor.chunk(MICRO_BATCHES, dim=1) for tensor in (emb_TBE, target_TB, *hidden)]
        for emb_TbE, target_Tb, h_LbH, c_LbH in zip(*pieces, strict=True):
            output_TbH, hidden = self.rnn(emb_TbE, (h_LbH.contiguous(), c_LbH.contiguous()), draw, first)
            # Trap: the proxy's first asynchronous call would ask for the object's type and go on in another thread,
            # outside this autograd context.  parameter_rrefs() has made a synchronous call, so the type is known.
            decoder = self.decoder_rref.rpc_async()
            losses.append(decoder.loss(to_wire(output_TbH), to_wire(target_Tb.contiguous()), draw, first))
            hiddens.append(hidden)
            first += target_Tb.shape[1]
        hidden = tuple(torch.cat(states, 1) for states in zip(*hiddens, strict=True))
        return sum(loss.wait().to(self.device) for loss in losses), hidden

    # What the optimizer, the evaluation and a checkpoint need of all three parts.

    def parameter_rrefs(self):
        """Return one RRef per parameter, wherever it lives, for DistributedOptimizer.  Source: tutorial part 2."""
        remote_params = []
        remote_params.extend(self.emb_table_rref.rpc_sync().parameter_rrefs())
        remote_params.extend(RRef(parameter) for parameter in self.rnn.parameters())
        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())
        return remote_params

    def train(self, mode=True):
        """Switch *all* parts of the model, as eval() does through it: nn.Module's own would switch the LSTM only."""
        for rref in (self.emb_table_rref, self.decoder_rref):
            rref.rpc_sync().set_training(mode)
        return super().train(mode)

    def init_hidden(self, num_streams):
        """Return (h, c), each (L, B, H) zeros: the start of a text."""
        zeros_LBH = torch.zeros(len(self.rnn.layers), num_streams, self.rnn.hidden_size, device=self.device)
        return zeros_LBH, zeros_LBH.clone()

    def state(self):
        """Return all parameters, local and remote, on the CPU."""
        return {
            "table": self.emb_table_rref.rpc_sync().state(),
            "decoder": self.decoder_rref.rpc_sync().state(),
            "rnn": {name: value.cpu() for name, value in self.rnn.state_dict().items()},
        }

    def load_state(self, state):
        """Put checkpointed parameters in place, on all workers."""
        self.emb_table_rref.rpc_sync().load_state(state["table"])
        self.decoder_rref.rpc_sync().load_state(state["decoder"])
        self.rnn.load_state_dict(state["rnn"])


MODES = {"logits": RNNModel.loss_here, "loss": RNNModel.loss_there, "overlap": RNNModel.loss_overlapped}
