"""The language model: an LSTM in this process, an embedding table and a decoder on parameter servers.

Runs in the trainer process.  Here is the tutorial's way through it, mode `logits`; the faster ones are in
faster_modes.py.

Shapes: T = time steps, B = streams, L = layers, E = embedding size, H = hidden size, V = vocabulary size.
"""

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.rpc import RRef

from faster_modes import loss_on_server, loss_overlapped
from glue.tensors import seed_for, to_wire
from keyed_dropout import KeyedLSTM
from remote_layers import Decoder, EmbeddingTable, summed_cross_entropy


class RNNModel(nn.Module):
    """Source: tutorial part 2, RNNModel.

    `ps` names the servers: the first owns the embedding table, the last (often the same one) the decoder.
    """

    def __init__(self, ps, ntoken, ninp, nhid, nlayers, dropout=0.5, *, seed, device="cpu"):
        super().__init__()
        self.ntoken = ntoken
        self.device = torch.device(device)
        # An nn.LSTM, except for the masks of its dropout.
        self.rnn = KeyedLSTM(ninp, nhid, nlayers, dropout, seed_for(seed, "rnn")).to(self.device)
        # remote() returns at once, before the layer is there.  Every layer has a seed of its own: two constructors that
        # run side by side on one server would share its default generator, in an order that nobody knows.
        self.emb_table_rref = rpc.remote(ps[0], EmbeddingTable, args=(ntoken, ninp, dropout, seed_for(seed, "table")))
        self.decoder_rref = rpc.remote(ps[-1], Decoder, args=(ntoken, nhid, dropout, seed_for(seed, "decoder")))

    def forward(self, input_TB, hidden, step=0):
        """(T, B) ids, hidden -> logits (T, B, V), hidden.  `step`, the number of the training step, is the key of the
        dropout masks on all workers.

        It reads like a local model: while a distributed autograd context is open, RPC notes each tensor that leaves
        and comes back, and the backward pass follows them.
        """
        emb_TBE = self.emb_table_rref.rpc_sync().forward(to_wire(input_TB), step).to(self.device)
        output_TBH, next_hidden = self.rnn(emb_TBE, hidden, step)
        decoded_TBV = self.decoder_rref.rpc_sync().forward(to_wire(output_TBH), step).to(self.device)
        return decoded_TBV, next_hidden

    def loss_on_trainer(self, input_TB, target_TB, hidden, step=0):
        """Mode `logits`, the tutorial's: the scores of all V words come over the wire, and the loss is computed here.

        Return the loss summed over T * B (a scalar), and the next hidden state.
        """
        decoded_TBV, next_hidden = self(input_TB, hidden, step)
        return summed_cross_entropy(decoded_TBV, target_TB.to(self.device)), next_hidden

    def parameter_rrefs(self):
        """Return one RRef per parameter, wherever it lives, for DistributedOptimizer.  Source: tutorial part 2."""
        remote_params = []
        remote_params.extend(self.emb_table_rref.rpc_sync().parameter_rrefs())
        remote_params.extend(RRef(parameter) for parameter in self.rnn.parameters())
        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())
        return remote_params

    def init_hidden(self, num_streams):
        """Return (h, c), each (L, B, H) zeros: the start of a text."""
        zeros_LBH = torch.zeros(len(self.rnn.layers), num_streams, self.rnn.hidden_size, device=self.device)
        return zeros_LBH, zeros_LBH.clone()

    def train(self, mode=True):
        """Switch *all* parts of the model, as eval() does through it: nn.Module's own would switch the LSTM only."""
        self.emb_table_rref.rpc_sync().set_training(mode)
        self.decoder_rref.rpc_sync().set_training(mode)
        return super().train(mode)

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


# Mode -> what computes the loss of one batch, on all workers.  The rest of a training step is the same for all modes.
MODES = {"logits": RNNModel.loss_on_trainer, "loss": loss_on_server, "overlap": loss_overlapped}
