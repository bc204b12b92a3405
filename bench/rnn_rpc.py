"""Measure rnn_rpc: tokens per second of each mode, and of one process that holds the whole model.

    python bench/rnn_rpc.py                            # vocabularies 100 to 33,000: about 25 minutes on 2 cores
    python bench/rnn_rpc.py --vocabularies 10000 --repeats 1 --json bench.json
    python bench/rnn_rpc.py --wire_bytes               # bytes per training step, computed and counted

All variants of a table train the same model on the same text. The sizes of embedding and hidden state are E = H = 200.
There are 2 layers, T = 35 tokens in a sequence, and B = 20 sequences in a batch. Start-up and evaluation are not
timed. The variant `single process` has one intra-op thread, as each rank has. The variant `single, 2 threads` has two
intra-op threads. With --wire_bytes, the bytes are computed from the shapes of the tensors, and the kernel counts them.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

from bytes_per_step import run_counted
from common import interleave, places, run_main, table, use_package, write_json

use_package("rnn_rpc")

from corpus import generated_corpus, get_next_batch, streams
from glue import flags, host
from trainer import WARM_UP_STEPS

MODES = ("logits", "loss", "overlap")
E, H, LAYERS, T, B = 200, 200, 2, 35, 20


def text_length(steps):
    """Return the length of a generated text whose training part, the first nine tenths, has `steps` batches."""
    return (B * (T * steps + 1)) * 10 // 9 + 1


def single_process(vocabulary, steps, threads, seed, device="cpu"):
    """Train the same model on the same text without RPC; return the rate."""
    torch.set_num_threads(threads)
    encoder = nn.Embedding(vocabulary, E)
    rnn = nn.LSTM(E, H, LAYERS)
    decoder = nn.Linear(H, vocabulary)
    model = nn.ModuleList([encoder, rnn, decoder]).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    text = generated_corpus(vocabulary, text_length(steps), seed)
    hidden = None
    seconds = tokens = 0
    for step, (data_TB, target_TB) in enumerate(get_next_batch(streams(text.train, B).to(device), T)):
        started = time.perf_counter()
        hidden = hidden and tuple(state.detach() for state in hidden)
        output_TBH, hidden = rnn(encoder(data_TB), hidden)
        loss = F.cross_entropy(decoder(output_TBH).flatten(0, 1), target_TB.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        opt.step()
        loss.item()  # the trainer reads it too; on a GPU this waits for the end of the step
        if step >= WARM_UP_STEPS:
            seconds += time.perf_counter() - started
            tokens += target_TB.numel()
    return {"tokens_per_second": tokens / seconds}


def flags_of(mode, vocabulary, args, place=(), world_size=2):
    """Return the flags of main.py for one run."""
    words = ["--mode", mode, "--world_size", world_size, "--seed", args.seed, *place]
    words += ["--vocabulary", vocabulary, "--corpus_tokens", text_length(args.steps), "--epochs", 1]
    words += ["--embedding_dim", E, "--hidden_dim", H, "--num_layers", LAYERS, "--bptt", T, "--batch_size", B]
    return [*words, "--lr", 1.0]


def speed(args):
    """Print a table for each vocabulary; return the numbers."""
    return {vocabulary: speed_with(vocabulary, args) for vocabulary in args.vocabularies}


def speed_with(vocabulary, args):
    """Print one table, with every mode on every device and with the single process; return the numbers."""

    def alone(threads, device="cpu"):
        return lambda: single_process(vocabulary, args.steps, threads, args.seed, device)

    def distributed(mode, **how):
        return lambda: run_main("rnn_rpc", flags_of(mode, vocabulary, args, **how))

    variants = {"single process": alone(1), "single, 2 threads": alone(2)}
    if args.device == "cuda":
        variants["single, cuda"] = alone(1, "cuda")
    for suffix, place in places(args.device).items():
        variants |= {mode + suffix: distributed(mode, place=place) for mode in MODES}
    variants["overlap, 2 servers"] = distributed("overlap", world_size=3)
    rows = interleave(variants, args.repeats)
    return table(rows, "tokens_per_second", "single process", f"tokens per second, V = {vocabulary:,}")


def payload_bytes(mode, vocabulary):
    """Return the bytes of all tensors that are sent in one training step, in the forward and in the backward pass."""
    ids, floats = 8 * T * B, 4 * T * B
    lookup = ids + 2 * floats * E  # token ids to the server; vectors to the trainer, and their gradients back
    outputs = 2 * floats * H  # LSTM outputs to the server, and their gradients back
    # In mode logits: logits to the trainer, and their gradients back. In the others: the target ids to the server.
    return lookup + outputs + (2 * floats * vocabulary if mode == "logits" else ids)


def wire_bytes(args):
    """Print bytes per training step of each mode, computed and counted; return the rows."""
    print(f"{'V':>7} {'mode':8} {'computed bytes/step':>20} {'counted by the kernel':>22} {'tokens/s over TCP':>18}")
    numbers = []
    for vocabulary in args.vocabularies:
        for mode in MODES:
            run, counted = run_counted("rnn_rpc", flags_of(mode, vocabulary, args))
            computed = payload_bytes(mode, vocabulary)
            row = (vocabulary, mode, computed, counted, run["tokens_per_second"])
            print(f"{row[0]:7,} {row[1]:8} {row[2]:20,} {row[3]:22,} {row[4]:18,.0f}", flush=True)
            numbers.append(row)
    return numbers


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="bench/rnn_rpc.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vocabularies", type=flags.positive_int, nargs="+", default=[100, 1000, 10_000, 33_000], metavar="V")
    add("--repeats", type=flags.positive_int, default=3, metavar="N", help="runs of each variant, interleaved")
    add("--steps", type=flags.positive_int, default=30, metavar="N", help="training steps; the first 5 are not timed")
    add("--wire_bytes", action="store_true", help="print bytes per training step instead")
    add("--seed", type=flags.non_negative_int, default=1, metavar="N")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: measure on the GPU as well as on the CPU")
    add("--json", metavar="FILE", help="write the raw numbers")
    args = parser.parse_args(argv)
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {args.steps}: the first {WARM_UP_STEPS} are not timed")
    return args


def main():
    args = parse_args()
    host.keep_freed_memory()  # every rank calls this, so the single process must too
    cores = host.usable_cores()
    print(
        f"torch {torch.__version__}, {cores} cores, device {args.device}, seed {args.seed}, {args.steps} steps of "
        f"T x B = {T} x {B} tokens, E = H = {H}, {LAYERS} layers",
        flush=True,
    )
    numbers = wire_bytes(args) if args.wire_bytes else speed(args)
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
