"""A language model in two processes. Rank 0, `ps` (parameter server), holds the embedding table and
the decoder. Rank 1, `trainer`, holds the LSTM between them and runs the training loop. Autograd and
the optimizer work across both processes.

    python tutorial.py              # starts both ranks on this machine
    python tutorial.py --rank 0     # starts only rank 0; --rank 1 in another terminal
    CUDA_VISIBLE_DEVICES= python tutorial.py    # hides CUDA GPUs: all stays on the CPU

Why RPC? It is for a model that is too large for one machine. (This one would fit, but shows how.)
Split the model into submodules, make each in the process where it should live, and reach it by its
RRef. The model then reads like one on several GPUs of one machine, where a tensor goes to the next
layer by `Tensor.to(device)`. Here it goes there as the argument of a call.

Part 2 of PyTorch's tutorial "Getting Started with Distributed RPC Framework" (both editions
of its text, and its code of 2025-08). "Difference 7" is number 7 in docs/differences/rnn_rpc.md.
"""

import argparse
import logging
import os
import sys
import threading
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

warnings.filterwarnings("ignore", message="You are using a Backend")  # about torch's own code
# This hides a remark of DistributedOptimizer, that the GIL may slow down the class SGD below.
logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)

# Shapes, with the tutorial's names: T time steps (`batch`), B streams, which are parts of the text
# read side by side (`nindices`), E and H vector sizes (`ninp`, `nhid`), V words (`ntoken`).


class EmbeddingTable(nn.Module):
    """From the number of a word to its vector.

    This object and the Decoder live on `ps`, where the methods that the trainer calls run on RPC
    threads (16 by default). Several could run at the same time. But no lock is needed here, because
    there is one trainer, which waits for each method's answer before it calls the next.
    """

    def __init__(self, ntoken, ninp, dropout):
        super().__init__()
        # The table is on a GPU if this process has one. Everything else is on the CPU.
        self.device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)  # on the CPU: the same on every device
        self.encoder.to(self.device)

    def forward(self, input):  # (T, B) -> (T, B, E)
        # RPC sends CPU tensors. To send tensors of a GPU, it needs device maps (difference 6).
        return self.drop(self.encoder(input.to(self.device))).cpu()

    def parameter_rrefs(self):
        return _parameter_rrefs(self)


class Decoder(nn.Module):
    """From an output of the LSTM to a score for each word."""

    def __init__(self, ntoken, nhid, dropout):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, output):  # (T, B, H) -> (T, B, V)
        return self.decoder(self.drop(output))

    def parameter_rrefs(self):
        return _parameter_rrefs(self)


def _parameter_rrefs(module):
    """Return an RRef to each parameter. The parameters themselves stay with their owner."""
    param_rrefs = []
    for param in module.parameters():
        param_rrefs.append(RRef(param))
    return param_rrefs


class RNNModel(nn.Module):
    """The model as the trainer sees it: an LSTM, and references to the two layers on `ps`.

    The three parts are those of word_language_model in pytorch/examples.
    """

    def __init__(self, ps, ntoken, ninp, nhid, nlayers, dropout=0.5):
        super().__init__()
        # remote() makes the object on `ps`, where it stays, and returns a reference to it, an
        # RRef. It does not wait, so both objects may be made at the same time, and they draw their
        # weights from one random generator. So two runs with the same seed may differ (difference
        # 14).
        self.emb_table_rref = rpc.remote(ps, EmbeddingTable, args=(ntoken, ninp, dropout))
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder_rref = rpc.remote(ps, Decoder, args=(ntoken, nhid, dropout))

    def forward(self, input, hidden):
        # rpc_sync() makes the method run in the process that owns the object, and waits for it.
        emb = self.emb_table_rref.rpc_sync().forward(input)  # (T, B, E)
        output, hidden = self.rnn(emb, hidden)  # (T, B, H)
        decoded = self.decoder_rref.rpc_sync().forward(output)  # (T, B, V)
        return decoded, hidden

    def parameter_rrefs(self):
        # parameters() would find only those of the LSTM: an RRef is not a submodule.
        remote_params = []
        remote_params.extend(self.emb_table_rref.rpc_sync().parameter_rrefs())
        remote_params.extend(_parameter_rrefs(self.rnn))
        remote_params.extend(self.decoder_rref.rpc_sync().parameter_rrefs())
        return remote_params


class SGD(optim.SGD):
    """The same as optim.SGD, but a subclass. If DistributedOptimizer got optim.SGD itself, it would
    use a functional version of it, which prints a warning about TorchScript in every process that
    owns a parameter (difference 8)."""


def run_trainer():
    batch = 20  # T, the time steps: the name is the tutorial's
    ntoken = 10
    ninp = 16

    nhid = 32
    nindices = 20
    nlayers = 1
    num_batches = 160  # of an epoch
    hidden = (torch.randn(nlayers, nindices, nhid), torch.randn(nlayers, nindices, nhid))

    # Dropout prevents a model from memorizing a text. This text never repeats, so dropout is off.
    model = RNNModel("ps", ntoken, ninp, nhid, nlayers, dropout=0.0)

    # This makes an optimizer in each process that owns parameters, SGD or any other.
    opt = DistributedOptimizer(SGD, model.parameter_rrefs(), lr=2.0)

    criterion = torch.nn.CrossEntropyLoss()

    # The text: each word is the sum, modulo 10, of the word two places before it and a random
    # number. Of these numbers, 0 is the most likely. No model can foresee them.
    prob = torch.softmax(-torch.arange(float(ntoken)), dim=0)
    lowest = torch.exp(-(prob * prob.log()).sum())  # perplexity is exp(loss): here exp(entropy)

    def get_next_batch():
        words = list(torch.randint(ntoken, (2, nindices)))
        for _ in range(num_batches):
            for _ in range(batch):
                number = torch.multinomial(prob, nindices, replacement=True)
                words.append((words[-2] + number) % ntoken)
            text = torch.stack(words[-batch - 1 :])
            yield text[:-1], text[1:]  # data and target (T, B): the target is the next word

    for epoch in range(10):
        total_loss = 0.0
        for data, target in get_next_batch():
            # The context records the calls inside it, so that backward() can go through them. In
            # each process, it keeps the gradients of this step under the id `context_id`. How:
            # https://docs.pytorch.org/docs/stable/rpc/distributed_autograd.html
            with dist_autograd.context() as context_id:
                # Continue from the last batch, but not its graph, whose context has ended.
                hidden[0].detach_()
                hidden[1].detach_()
                output, hidden = model(data, hidden)
                loss = criterion(output.flatten(0, 1), target.flatten())  # difference 4
                # From the loss through the decoder on `ps`, the LSTM here, the table on `ps`.
                dist_autograd.backward(context_id, [loss])
                # In each process the optimizer steps, with the context's gradients of that process.
                # No zero_grad() is needed, because each new context starts without gradients.
                opt.step(context_id)
            total_loss += loss.detach()
        perplexity = torch.exp(total_loss / num_batches)
        print(f"Training epoch {epoch}: perplexity {perplexity:.3f} (lowest possible {lowest:.3f})")


def run_worker(rank, args):
    if parent := mp.parent_process():  # a spawned rank ends when its parent ends
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(1)  # such small operations are slower with more threads
    torch.manual_seed(args.seed + rank)
    # TCP instead of shared memory, and no channels for GPUs: private to torch (docs/COSTS.md).
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    world_size = args.world_size
    if rank == 1:
        rpc.init_rpc("trainer", rank=rank, world_size=world_size, rpc_backend_options=options)
        run_trainer()
    else:
        rpc.init_rpc("ps", rank=rank, world_size=world_size, rpc_backend_options=options)
        # The parameter server needs no loop, because its RPC threads serve the trainer.

    # Wait until all ranks have called this. Until then, `ps` serves calls.
    rpc.shutdown()


def parse_args():
    parser = argparse.ArgumentParser(description="Rank 0 is the parameter server, 1 the trainer.")
    parser.add_argument("--world_size", type=int, default=2, choices=[2], help="ranks (2)")
    parser.add_argument("--rank", type=int, choices=[0, 1], help="start only this rank")
    parser.add_argument("--master_addr", default="localhost", help="host of rank 0 (localhost)")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port on it (29500)")
    parser.add_argument("--seed", type=int, default=1, help="of all random numbers (1)")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # else torch may wait 10 s for DNS
    if args.master_addr in ("localhost", "127.0.0.1"):
        # RPC and Gloo on loopback only; torch's store listens on all interfaces (docs/CLUSTERS.md).
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.update(TP_SOCKET_IFNAME=loopback, GLOO_SOCKET_IFNAME=loopback)
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_worker(args.rank, args)  # one rank in this terminal
