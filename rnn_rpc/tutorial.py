"""The tutorial in one file: a language model with its embedding and decoder on a parameter server.

    python tutorial.py              # starts both ranks on this machine
    python tutorial.py --rank 0     # starts only rank 0, the parameter server
    python tutorial.py --rank 1     # starts only rank 1, the trainer, in another terminal

It follows part 2 of PyTorch's tutorial "Getting Started with Distributed RPC Framework", in the
edition that DIFFERENCES.md calls the newer text.  "Point 4" means number 4 in DIFFERENCES.md.

Rank 0, `ps`, owns the embedding table and the decoder.  Rank 1, `trainer`, has the LSTM and the
training loop.  RPC sends functions and classes as names, and both ranks run this same file.
Shapes: T time steps, B streams (parts of a text, read side by side), V words, E, H vector sizes.
"""

import argparse
import logging
import os
import sys
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef


class EmbeddingTable(nn.Module):
    def __init__(self, ntoken, ninp, seed):  # without dropout: point 18
        super().__init__()
        # skip_init leaves out torch's usual first values.  They would use the shared generator.
        self.encoder = nn.utils.skip_init(nn.Embedding, ntoken, ninp)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))

    def forward(self, input):
        """Return a vector for each word: (T, B) -> (T, B, E)."""
        return self.encoder(input)


class Decoder(nn.Module):
    def __init__(self, ntoken, nhid, seed):
        super().__init__()
        self.decoder = nn.utils.skip_init(nn.Linear, nhid, ntoken)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1, torch.Generator().manual_seed(seed))

    def forward(self, output):
        """Return the scores of all V words: (T, B, H) -> (T, B, V)."""
        return self.decoder(output)


def _call_method(method, rref, *args):
    """Runs on the owner of rref.  The trainer makes one call at a time, so no lock is needed."""
    return method(rref.local_value(), *args)


def _remote_method(method, rref, *args):
    """Run the method on the owner of rref.  rref.rpc_sync() would do the same (point 7)."""
    return rpc.rpc_sync(rref.owner(), _call_method, args=(method, rref, *args))


def _parameter_rrefs(module):
    """Return one RRef per parameter.  Runs on their owner, and does not send their values."""
    return [RRef(param) for param in module.parameters()]


class RNNModel(nn.Module):
    def __init__(self, ps, ntoken, ninp, nhid, nlayers):
        super().__init__()
        # remote() does not wait, so both constructors may run on ps at the same time, where they
        # share one random generator.  With seeds of their own, a run is repeatable (point 14).
        table_seed, decoder_seed = torch.randint(2**31, (2,)).tolist()
        self.emb_table_rref = rpc.remote(ps, EmbeddingTable, args=(ntoken, ninp, table_seed))
        self.rnn = nn.LSTM(ninp, nhid, nlayers)
        self.decoder_rref = rpc.remote(ps, Decoder, args=(ntoken, nhid, decoder_seed))

    def forward(self, input, hidden):
        emb = _remote_method(EmbeddingTable.forward, self.emb_table_rref, input)  # (T, B, E)
        output, hidden = self.rnn(emb, hidden)  # (T, B, H)
        decoded = _remote_method(Decoder.forward, self.decoder_rref, output)  # (T, B, V)
        return decoded, hidden

    def parameter_rrefs(self):
        remote_params = []
        remote_params.extend(_remote_method(_parameter_rrefs, self.emb_table_rref))
        remote_params.extend(_parameter_rrefs(self.rnn))
        remote_params.extend(_remote_method(_parameter_rrefs, self.decoder_rref))
        return remote_params


class SGD(optim.SGD):
    """DistributedOptimizer replaces optim.SGD by a deprecated class, but not this one (point 8)."""


def get_next_batch(prob, T, B, nbatches):
    """Yield nbatches pairs (data, target), each (T, B).  A word's target is the next word."""
    words = list(torch.randint(len(prob), (2, B)))
    while len(words) <= T * nbatches:
        # The next word: the word before the last, plus a random number drawn from prob (point 19).
        words.append((words[-2] + torch.multinomial(prob, B, replacement=True)) % len(prob))
    text = torch.stack(words)
    yield from zip(text[:-1].split(T), text[1:].split(T), strict=True)


def run_trainer(seed):
    torch.manual_seed(seed)  # for the texts, the LSTM, and the seeds of the table and the decoder
    prob = torch.softmax(-torch.arange(10.0), dim=0)  # probabilities of the random numbers 0 to 9
    lowest = torch.exp(-(prob * prob.log()).sum())  # exp(entropy); perplexity is exp(mean loss)
    heldout_data, heldout_target = next(get_next_batch(prob, T=1000, B=20, nbatches=1))
    model = RNNModel("ps", ntoken=10, ninp=16, nhid=32, nlayers=1)  # sizes: point 19
    # DistributedOptimizer makes an optimizer in each process that owns parameters.
    opt = DistributedOptimizer(SGD, model.parameter_rrefs(), lr=2.0)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(8):
        hidden = None  # the LSTM's state starts at zero
        for data, target in get_next_batch(prob, T=20, B=20, nbatches=200):
            # Calls inside a context are recorded, so that backward() can continue in ps.  Each
            # process keeps the gradients of its parameters in the context, not in .grad.  They
            # are deleted when the context ends.  So there is no zero_grad().
            with dist_autograd.context() as context_id:
                output, hidden = model(data, hidden)
                loss = criterion(output.flatten(0, 1), target.flatten())  # DIFFERENCES.md, point 4
                dist_autograd.backward(context_id, [loss])
                opt.step(context_id)
            # The next batch needs the state without its graph, because the context has ended.
            hidden = (hidden[0].detach(), hidden[1].detach())
        # If there were dropout, model.eval() would not turn it off on ps (point 9).
        with torch.no_grad():
            output, _ = model(heldout_data, None)
            loss = criterion(output.flatten(0, 1), heldout_target.flatten())
        print(f"Training epoch {epoch}: perplexity {loss.exp():.3f} (lowest possible {lowest:.3f})")


def run_worker(rank, args):
    """Run one rank.  Sets the process's number of threads, and hides two messages of torch."""
    torch.set_num_threads(1)  # the ranks share the cores
    warnings.filterwarnings("ignore", "You are using a Backend")  # caused by torch
    # DistributedOptimizer logs that Python's GIL may slow down an optimizer such as SGD above.
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    # torch's default transport, shared memory, keeps a core busy for every rank, so all ranks are
    # slow if cores are few.  TCP ("uv") does not.  _transports is private to torch (point 22).
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"])
    if rank == 1:
        rpc.init_rpc("trainer", rank=rank, world_size=args.world_size, rpc_backend_options=options)
        run_trainer(args.seed)
    else:
        rpc.init_rpc("ps", rank=rank, world_size=args.world_size, rpc_backend_options=options)
        # The parameter server has no loop.  Its RPC threads serve the trainer's calls.
    rpc.shutdown()  # returns when both ranks have called it


def parse_args():
    parser = argparse.ArgumentParser(description="Rank 0 is the parameter server, 1 the trainer.")
    parser.add_argument("--world_size", type=int, default=2, choices=[2], help="number of ranks")
    parser.add_argument("--rank", type=int, choices=[0, 1], help="rank to run (default: both)")
    parser.add_argument("--master_addr", default="localhost", help="the host of rank 0")
    parser.add_argument("--master_port", type=int, default=29500, help="a free port of that host")
    parser.add_argument("--seed", type=int, default=1, help="seed of all random numbers")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(args.master_port)
    if args.master_addr in ("localhost", "127.0.0.1"):
        # Anyone who can connect to a rank can run code in it.  So RPC listens on the loopback
        # interface only (point 21).  The store, at --master_port, still listens on all interfaces.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # init_rpc uses Gloo for a moment
    if args.rank is None:
        mp.spawn(run_worker, args=(args,), nprocs=args.world_size)  # every rank on this machine
    else:
        run_worker(args.rank, args)  # one rank in this terminal

# Limits: if a rank dies, spawned ranks end, but a rank in another terminal may wait forever (in
# main.py it ends: glue/supervisor.py).  The port must be free (main.py uses any free port for
# spawned ranks).  Nothing is saved (main.py --checkpoint FILE saves: glue/checkpoint.py).
