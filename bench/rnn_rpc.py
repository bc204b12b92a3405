"""Measure rnn_rpc: tokens per second of each mode, and of one process that holds the whole model.

    python bench/rnn_rpc.py                            # vocabularies 100 to 33,000: about 10 minutes on 2 cores
    python bench/rnn_rpc.py --vocabularies 10000 --repeats 1

All variants of a table train the same model on the same text. The sizes of embedding and hidden state are E = H = 200.
There are 2 layers, T = 35 tokens in a sequence, and B = 20 sequences in a batch. Start-up and evaluation are not
timed. The variant `single process` has one intra-op thread, as each rank has. The variant `single, 2 threads` has two
intra-op threads.
"""

import functools
import time

import torch
import torch.nn.functional as F
from torch import nn

from common import argument_parser, compare, places, run_main, use_package, write_json

use_package("rnn_rpc")

from glue import host

from corpus import generated_corpus, get_next_batch, streams
from trainer import WARM_UP_STEPS

MODES = ("logits", "loss", "overlap")
E, H, LAYERS, T, B = 200, 200, 2, 35, 20
STEPS = 30  # of a run; the first WARM_UP_STEPS are not timed
TOKENS = (B * (T * STEPS + 1)) * 10 // 9 + 1  # the training part, the first nine tenths, has this many batches


def train_in_one_process(encoder, rnn, decoder, opt, batches, clip, hidden=None):
    """Train without RPC, and yield the loss of each step. The tests compare the modes with this loop."""
    parameters = [parameter for group in opt.param_groups for parameter in group["params"]]
    for data_TB, target_TB in batches:
        hidden = hidden and tuple(state.detach() for state in hidden)
        output_TBH, hidden = rnn(encoder(data_TB), hidden)
        loss = F.cross_entropy(decoder(output_TBH).flatten(0, 1), target_TB.flatten())
        opt.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(parameters, clip)
        opt.step()
        yield loss.item()  # the trainer reads it too; on a GPU this waits for the end of the step


def single_process(vocabulary, seed, threads=1, device="cpu"):
    """Train the same model on the same text without RPC; return the rate."""
    torch.set_num_threads(threads)
    encoder = nn.Embedding(vocabulary, E)
    rnn = nn.LSTM(E, H, LAYERS)
    decoder = nn.Linear(H, vocabulary)
    model = nn.ModuleList([encoder, rnn, decoder]).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    text = generated_corpus(vocabulary, TOKENS, seed)
    batches = get_next_batch(streams(text.train, B).to(device), T)
    steps = train_in_one_process(encoder, rnn, decoder, opt, batches, clip=0.25)
    for _ in range(WARM_UP_STEPS):
        next(steps)
    started = time.perf_counter()
    timed = len(list(steps))
    return {"tokens_per_second": timed * T * B / (time.perf_counter() - started)}


def main():
    parser = argument_parser(__doc__)
    vocabularies = [100, 1000, 10_000, 33_000]
    parser.add_argument(
        "--vocabularies", type=int, nargs="+", default=vocabularies, metavar="V", help="a table for each"
    )
    args = parser.parse_args()
    tables = {}
    for vocabulary in args.vocabularies:
        words = ["--seed", args.seed, "--vocabulary", vocabulary, "--corpus_tokens", TOKENS, "--epochs", 1, "--lr", 1.0]
        words += ["--embedding_dim", E, "--hidden_dim", H, "--num_layers", LAYERS, "--bptt", T, "--batch_size", B]
        run = functools.partial(run_main, "rnn_rpc", *words)
        single = functools.partial(single_process, vocabulary, args.seed)
        variants = {"single process": single, "single, 2 threads": functools.partial(single, threads=2)}
        if args.device == "cuda":
            variants["single, cuda"] = functools.partial(single, device="cuda")
        for suffix, place in places(args.device).items():
            variants |= {mode + suffix: functools.partial(run, "--mode", mode, *place) for mode in MODES}
        variants["overlap, 2 servers"] = functools.partial(run, "--mode", "overlap", "--world_size", 3)
        title = f"tokens per second, V = {vocabulary:,}, {host.usable_cores()} cores, torch {torch.__version__}"
        tables[vocabulary] = compare(variants, args, "tokens_per_second", "single process", title)
    write_json(args.json, tables)


if __name__ == "__main__":
    main()
