"""The language model: an LSTM in the trainer's process, an embedding table and a decoder on parameter servers.

Runs in the trainer process.  This file has the forward pass of mode `logits`, which is the tutorial's.  The faster
modes are in faster_modes.py.

Shapes: T = time steps, B = streams, L = layers, E = embedding size, H = hidden size, V = vocabulary size.
"""

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.rpc import RRef

from faster_modes import loss_on_server, loss_overlapped
from glue.seeds import seed_for
from keyed_dropout import KeyedLSTM
from remote_layers import Decoder, EmbeddingTable, summed_cross_entropy


class RNNModel(nn.Module):
    """Source: tutorial part 2, RNNModel.

    `ps` is a list of the servers' names.  The first server owns the embedding table, the last one owns the decoder.
    With one server they are the same.
    """

    def __init__(self, ps, ntoken, ninp, nhid, nlayers, dropout=0.5, *, seed, device="cpu"):
        super().__init__()
        self.ntoken = ntoken
        self.device = torch.device(device)
        # KeyedLSTM differs from nn.LSTM only in its dropout masks.
        self.rnn = KeyedLSTM(ninp, nhid, nlayers, dropout, seed_for(seed, "rnn")).to(self.device)
        # remote() returns at once, before the layer exists.  So both constructors may run on one server at the same
        # time.  There they would share the default generator, and chance would decide which of them uses it first.
        # So each layer has a seed of its own.
        self.emb_table_rref = rpc.remote(ps[0], EmbeddingTable, args=(ntoken, ninp, dropout, seed_for(seed, "table")))
        self.decoder_rref = rpc.remote(ps[-1], Decoder, args=(ntoken, nhid, dropout, seed_for(seed, "decoder")))

    def forward(self, input_TB, hidden, step=0):
        """Return the logits (T, B, V) and the next hidden state, from token ids (T, B) and a hidden state.

        `step` is the number of the training step.  It is the key of the dropout masks in all processes.

        The code looks like that of a local model.  If a distributed autograd context is open, autograd records each
        tensor that is sent and received, and the backward pass follows these records.
        """
        # RPC's CUDA support is beta, so tensors travel on the CPU.  Autograd follows cpu() and to().
        emb_TBE = self.emb_table_rref.rpc_sync().forward(input_TB.cpu(), step).to(self.device)
        output_TBH, next_hidden = self.rnn(emb_TBE, hidden, step)
        decoded_TBV = self.decoder_rref.rpc_sync().forward(output_TBH.cpu(), step).to(self.device)
        return decoded_TBV, next_hidden

    def loss_on_trainer(self, input_TB, target_TB, hidden, step=0):
        """Mode `logits`, the tutorial's: the server sends the scores of all V words, and the trainer computes the loss.

        Return the loss summed over T * B (a scalar), and the next hidden state.
        """
        decoded_TBV, next_hidden = self(input_TB, hidden, step)
        return summed_cross_entropy(decoded_TBV, target_TB.to(self.device)), next_hidden

    def parameter_rrefs(self):
        """Return an RRef to each parameter in any process, for DistributedOptimizer.  Source: tutorial part 2."""
        remote_params = []
        remote_params.extend(self.emb_table_rref.rpc_sync().parameter_rrefs())
        remote_params.extend(RRef(parameter) for parameter in self.rnn.parameters())
        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())
        return remote_params

    def init_hidden(self, num_streams):
        """Return the hidden state at the start of a text: (h, c), each of zeros (L, B, H)."""
        zeros_LBH = torch.zeros(len(self.rnn.layers), num_streams, self.rnn.hidden_size, device=self.device)
        return zeros_LBH, zeros_LBH.clone()

    def train(self, mode=True):
        """Switch all parts of the model between training and evaluation; eval() calls this with False.

        nn.Module's own train() would switch the LSTM only, because an RRef is not a submodule.
        """
        self.emb_table_rref.rpc_sync().set_training(mode)
        self.decoder_rref.rpc_sync().set_training(mode)
        return super().train(mode)

    def state(self):
        """Return all parameters, local and remote, as CPU tensors."""
        return {
            "table": self.emb_table_rref.rpc_sync().state(),
            "decoder": self.decoder_rref.rpc_sync().state(),
            "rnn": {name: value.cpu() for name, value in self.rnn.state_dict().items()},
        }

    def load_state(self, state):
        """Load all parameters from a checkpoint, in all processes.  `state`: as state() returns it."""
        self.emb_table_rref.rpc_sync().load_state(state["table"])
        self.decoder_rref.rpc_sync().load_state(state["decoder"])
        self.rnn.load_state_dict(state["rnn"])


# The function that computes the loss of a batch, for each mode.  The rest of a training step is the same in all modes.
MODES = {"logits": RNNModel.loss_on_trainer, "loss": loss_on_server, "overlap": loss_overlapped}
