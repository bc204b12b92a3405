"""Mode `logits`, the tutorial's: the server sends the scores of all V words, and the trainer computes the loss.

A step begins in Trainer.train_step (trainer.py), which calls RNNModel.summed_loss below. It looks up the vectors of
the words on a server, runs the LSTM in the trainer, and asks a server for the scores. The backward pass takes the same
way back.

Shapes: T = time steps, B = streams, L = layers (nlayers: --num_layers), E = embedding size (ninp: --embedding_dim),
H = hidden size (nhid: --hidden_dim), V = vocabulary size (ntoken). The names in brackets are the tutorial's.
"""

from glue import checkpoint
from glue.training import seed_for

import torch
import torch.distributed.rpc as rpc
import torch.nn.functional as F
from torch import nn


class RNNModel(nn.Module):  # in the trainer
    """Source: tutorial, RNNModel.

    The first of the `servers` (names) gets the embedding table, the last one the decoder. `devices`: name -> device.
    """

    def __init__(self, decoder_class, servers, ntoken, ninp, nhid, nlayers, dropout, *, seed, devices):
        super().__init__()
        self.ntoken = ntoken
        self.device = devices["trainer"]
        torch.manual_seed(seed_for(seed, "rnn"))
        # nn.LSTM drops between its layers, and warns if there is only one.
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout if nlayers > 1 else 0.0).to(self.device)
        # remote() does not wait, so both constructors may run on one server at the same time. Each layer draws its
        # weights with a seed of its own: from the server's one generator, they would draw in an order left to chance.
        # timeout=0: there is no time limit.
        first, last = servers[0], servers[-1]
        table_args = (ntoken, ninp, dropout, seed_for(seed, "table"), devices[first])
        self.emb_table_rref = rpc.remote(first, EmbeddingTable, args=table_args, timeout=0)
        decoder_args = (ntoken, nhid, dropout, seed_for(seed, "decoder"), devices[last])
        self.decoder_rref = rpc.remote(last, decoder_class, args=decoder_args, timeout=0)

    def summed_loss(self, input_TB, target_TB, hidden):
        """Return the cross entropy in nats (natural logarithm), *summed* over T * B predictions; and the next state."""
        decoded_TBV, next_hidden = self(input_TB, hidden)
        return summed_cross_entropy(decoded_TBV, target_TB.to(self.device)), next_hidden

    def forward(self, input_TB, hidden):
        """Return the logits (T, B, V) and the next hidden state, from token ids (T, B) and a hidden state.

        Only CPU tensors are sent, whatever the devices are. Autograd follows cpu() and to() as it follows the calls.
        """
        emb_TBE = self.emb_table_rref.rpc_sync().forward(input_TB.cpu()).to(self.device)
        output_TBH, next_hidden = self.rnn(emb_TBE, hidden)
        decoded_TBV = self.decoder_rref.rpc_sync().forward(output_TBH.cpu()).to(self.device)
        return decoded_TBV, next_hidden

    def init_hidden(self, num_streams):
        """Return the hidden state at the start of a text: (h, c), each of zeros (L, B, H)."""
        zeros_LBH = torch.zeros(self.rnn.num_layers, num_streams, self.rnn.hidden_size, device=self.device)
        return zeros_LBH, zeros_LBH.clone()

    # The methods below reach all three layers. Those of nn.Module would find the LSTM only: an RRef is no submodule.

    def parameter_rrefs(self):
        """Return an RRef to each parameter in any process, for DistributedOptimizer."""
        remote_params = []
        remote_params.extend(self.emb_table_rref.rpc_sync().parameter_rrefs())
        remote_params.extend(rpc.RRef(parameter) for parameter in self.rnn.parameters())
        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())
        return remote_params

    def train(self, mode=True):
        """Switch all layers between training and evaluation. (eval() calls this with False.)"""
        self.emb_table_rref.rpc_sync().set_training(mode)
        self.decoder_rref.rpc_sync().set_training(mode)
        return super().train(mode)

    def state_dict(self):
        """Return all parameters as CPU tensors."""
        return {
            "table": self.emb_table_rref.rpc_sync().state_dict(),
            "decoder": self.decoder_rref.rpc_sync().state_dict(),
            "rnn": {name: value.cpu() for name, value in self.rnn.state_dict().items()},
        }

    def load_state_dict(self, state):
        self.emb_table_rref.rpc_sync().load_state_dict(state["table"])
        self.decoder_rref.rpc_sync().load_state_dict(state["decoder"])
        self.rnn.load_state_dict(state["rnn"])


class RemoteLayer(nn.Module):  # on a server, on RPC threads
    """What a layer needs if its caller is another process.

    No method takes a lock. Two forward or backward passes may run at once (in mode `overlap`), but they only read the
    parameters, and torch adds up their gradients under a lock of the context. Whatever changes the layer (the
    optimizer's step, set_training, load_state_dict) runs between passes, because the trainer waits for all answers.
    """

    def parameter_rrefs(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def set_training(self, training):
        """Switch dropout and autograd on or off: the trainer's own eval() and no_grad() have no effect here.

        The trainer does not call train() itself, because train() returns the module, and RPC would send it back.
        """
        self.train(training)
        self.requires_grad_(training)

    def state_dict(self, *args, **kwargs):
        return {name: value.cpu() for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state):
        with checkpoint.going_on_from():
            super().load_state_dict(state)


class EmbeddingTable(RemoteLayer):  # on a server, on RPC threads
    """A vector for each token id. Source: tutorial, EmbeddingTable."""

    def __init__(self, ntoken, ninp, dropout, seed, device):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        self.device = device
        self.to(device)

    def forward(self, input_TB):
        """Return the vectors (T, B, E) of int64 ids (T, B)."""
        return self.drop(self.encoder(input_TB.to(self.device))).cpu()


class Decoder(RemoteLayer):  # on a server, on RPC threads
    """A score for each word of the vocabulary, from an output of the LSTM. Source: tutorial, Decoder."""

    def __init__(self, ntoken, nhid, dropout, seed, device):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.decoder.bias)
        self.device = device
        self.to(device)

    def forward(self, output_TBH):
        """Return the logits (T, B, V) of (T, B, H). That is V / H times as many bytes as came in."""
        return self.decoder(self.drop(output_TBH.to(self.device))).cpu()


def summed_cross_entropy(logits_TBV, target_TB):
    # A sum and not a mean, because mode `overlap` adds the losses of two parts. train_step makes it a mean.
    return F.cross_entropy(logits_TBV.flatten(0, 1), target_TB.flatten(), reduction="sum")
