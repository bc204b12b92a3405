"""How many tokens per second each mode trains on, beside one process that holds the whole model.

    python bench.py                            # vocabularies 100 to 33,000: about 25 minutes on 2 cores
    python bench.py --vocabularies 10000 --repeats 1 --json bench.json
    python bench.py --wire_bytes               # bytes per step of each mode: computed, and counted by the kernel
    python bench.py --memory                   # resident memory of every rank over 2,000 iterations

Every row of a table trains the same model (E = H = 200, 2 layers, T = 35, B = 20) on the same text. Rates leave out
start-up and evaluation. `single process` has one intra-op thread, as each rank has; a second row gives it two.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

from corpus import batches, generated_corpus, streams
from glue import flags, launch, measure

HERE = os.path.dirname(os.path.abspath(__file__))
E, H, LAYERS, T, B = 200, 200, 2, 35, 20
MODES = ("logits", "loss", "overlap")
WARM_UP_STEPS = 5  # as in trainer.py


def text_length(steps):
    """Tokens of a generated text whose first nine tenths make so many batches."""
    return (B * (T * steps + 1)) * 10 // 9 + 1


def single_process(vocabulary, steps, threads, seed, device="cpu"):
    """The same model, text and optimizer without RPC; also the same memory allocator settings."""
    torch.set_num_threads(threads)
    table, rnn, decoder = nn.Embedding(vocabulary, E), nn.LSTM(E, H, LAYERS), nn.Linear(H, vocabulary)
    model = nn.ModuleList([table, rnn, decoder]).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    text = generated_corpus(vocabulary, text_length(steps), seed)
    hidden, times = None, []
    for input_TB, targets_TB in batches(streams(text.train, B).to(device), T):
        started = time.perf_counter()
        hidden = hidden and tuple(state.detach() for state in hidden)
        output_TBH, hidden = rnn(table(input_TB), hidden)
        loss = F.cross_entropy(decoder(output_TBH).flatten(0, 1), targets_TB.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        opt.step()
        loss.item()  # the trainer reads it too; on a GPU this waits for the step to end
        times.append((time.perf_counter() - started, targets_TB.numel()))
    timed = times[WARM_UP_STEPS:]
    return {"tokens_per_second": sum(tokens for _, tokens in timed) / sum(seconds for seconds, _ in timed)}


def flags_of(mode, vocabulary, steps, args, place=(), world_size=2):
    flags = ["--mode", mode, "--world_size", world_size, "--seed", args.seed, *place]
    flags += ["--vocabulary", vocabulary, "--corpus_tokens", text_length(steps), "--epochs", 1]
    flags += ["--embedding_dim", E, "--hidden_dim", H, "--num_layers", LAYERS, "--bptt", T, "--batch_size", B]
    return [*flags, "--lr", 1.0]


def speed(args):
    numbers = {}
    for vocabulary in args.vocabularies:
        # Default arguments bind the loop's values now; a closure would read them when the loop is over.
        variants = {
            "single process": lambda v=vocabulary: single_process(v, args.steps, 1, args.seed),
            "single, 2 threads": lambda v=vocabulary: single_process(v, args.steps, 2, args.seed),
        }
        if args.device == "cuda":
            variants["single, cuda"] = lambda v=vocabulary: single_process(v, args.steps, 1, args.seed, "cuda")
        for suffix, place in measure.places(args.device).items():
            for mode in MODES:
                variants[mode + suffix] = lambda m=mode, v=vocabulary, place=place: measure.run_main(
                    HERE, flags_of(m, v, args.steps, args, place)
                )
        variants["overlap, 2 servers"] = lambda v=vocabulary: measure.run_main(
            HERE, flags_of("overlap", v, args.steps, args, world_size=3)
        )
        rows = measure.interleave(variants, args.repeats)
        title = f"tokens per second, V = {vocabulary:,}"
        numbers[vocabulary] = measure.table(rows, "tokens_per_second", "single process", title)
    return numbers


def payload_bytes(mode, vocabulary):
    """What the tensors of one training step weigh: there in the forward pass, and their gradients back."""
    ids, floats = 8 * T * B, 4 * T * B
    lookup = ids + 2 * floats * E  # token ids go; vectors come, and their gradients go
    outputs = 2 * floats * H  # LSTM outputs go, their gradients come
    return lookup + outputs + (2 * floats * vocabulary if mode == "logits" else ids)  # logits come, gradients go


def wire_bytes(args):
    print(f"{'V':>7} {'mode':8} {'computed bytes/step':>20} {'counted by the kernel':>22} {'tokens/s over TCP':>18}")
    numbers = []
    for vocabulary in args.vocabularies:
        for mode in MODES:
            run = measure.run_main(HERE, [*flags_of(mode, vocabulary, args.steps, args), "--transport", "tcp"])
            computed = payload_bytes(mode, vocabulary)
            row = (vocabulary, mode, computed, run["wire_bytes_per_step"], run["tokens_per_second"])
            print(f"{row[0]:7,} {row[1]:8} {row[2]:20,} {row[3]:22,} {row[4]:18,.0f}", flush=True)
            numbers.append(row)
    return numbers


def memory(args):
    """Resident memory of every rank, looked at from outside, while --mode trains for 2,000 iterations."""
    steps, vocabulary = 2000, args.vocabularies[0]
    with tempfile.TemporaryDirectory() as folder:
        summary = os.path.join(folder, "summary.json")
        flags = [*flags_of(args.mode, vocabulary, steps, args, ["--device", args.device]), "--summary_json", summary]
        command = [sys.executable, os.path.join(HERE, "main.py"), *map(str, flags)]
        job, samples = subprocess.Popen(command, stdout=subprocess.DEVNULL), []
        while job.poll() is None:
            time.sleep(1.0)  # a sampling interval
            sample = [mebibytes for mebibytes in map(resident_mebibytes, ranks_of(job.pid)) if mebibytes]
            samples += [sample] if len(sample) == 2 else []
        if job.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with status {job.returncode}")
        with open(summary) as file:
            result = json.load(file)
    print(f"resident MiB over {result['steps']} iterations, mode {args.mode}, V = {vocabulary:,}")
    print(f"{'':8}" + "".join(f"{part:>10}" for part in ("at 1/4", "at 1/2", "at 3/4", "at end", "growth")))
    numbers = {}
    for rank, name in enumerate(("ps", "trainer")):
        points = [samples[len(samples) * quarter // 4 - 2][rank] for quarter in (1, 2, 3, 4)]
        print(f"{name:8}" + "".join(f"{point:10.1f}" for point in [*points, points[-1] - points[0]]), flush=True)
        numbers[name] = points
    return numbers


def ranks_of(pid):
    """The spawned ranks in the order of their start: forked by the job's forkserver."""
    servers = [child for child in _children(pid) if b"multiprocessing.forkserver" in _read(f"/proc/{child}/cmdline")]
    return sorted(rank for server in servers for rank in _children(server))


def resident_mebibytes(pid):
    for line in _read(f"/proc/{pid}/status").decode().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return None  # gone


def _children(pid):
    return [int(child) for child in _read(f"/proc/{pid}/task/{pid}/children").split()]


def _read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="rnn_rpc/bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vocabularies", type=flags.positive_int, nargs="+", default=[100, 1000, 10_000, 33_000], metavar="V")
    add("--repeats", type=flags.positive_int, default=3, metavar="N")
    add("--steps", type=flags.positive_int, default=30, metavar="N", help="of training, 5 of them to warm up")
    add("--memory", action="store_true", help="resident memory over 2,000 iterations instead (of the first V)")
    add("--wire_bytes", action="store_true", help="bytes per step instead")
    add("--mode", choices=MODES, default="logits", help="for --memory")
    add("--seed", type=flags.non_negative_int, default=1, metavar="N")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: speed beside the CPU; memory on the GPU alone")
    add("--json", metavar="FILE", help="write the numbers")
    args = parser.parse_args(argv)
    if args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {args.steps}: the first {WARM_UP_STEPS} are not timed")
    return args


def main():
    args = parse_args()
    launch.keep_freed_memory()  # what every rank does: else the single process would pay for page faults they do not
    cores = len(os.sched_getaffinity(0))
    print(
        f"torch {torch.__version__}, {cores} cores, device {args.device}, seed {args.seed}, {args.steps} steps of "
        f"T x B = {T} x {B} tokens, E = H = {H}, {LAYERS} layers",
        flush=True,
    )
    numbers = memory(args) if args.memory else wire_bytes(args) if args.wire_bytes else speed(args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(numbers, file, indent=2)


if __name__ == "__main__":
    main()
