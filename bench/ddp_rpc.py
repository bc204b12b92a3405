"""Measure ddp_rpc: speed of each mode and of one process without RPC, and bytes per training step.

    python bench/ddp_rpc.py                        # all tables: about 25 minutes on 2 cores
    python bench/ddp_rpc.py --tables modes --repeats 3 --json bench.json

These tables are measured:

- modes: batches per second at about the tutorial's sizes, with 1 and 2 servers
- bags: samples per second with 8, 64 and 1024 bags in a batch
- rows: batches per second with 10^2 to 10^6 rows in the embedding table, with sparse gradients, and hogwild with dense
- wire: bytes per training step and trainer, over TCP

Speeds are those of the training loop. Start-up, the making of data, and evaluation are not timed.
"""

import argparse
import functools
import itertools
import time

import torch
from torch import nn, optim

from bytes_per_step import run_counted
from common import interleave, places, run_main, table, use_package, write_json

use_package("ddp_rpc")

from clicks import NUM_CLASSES, ClickLog
from glue import flags, host
from main import MODES

SINGLE = "single process"
TABLES = ("modes", "bags", "rows", "wire")
EPOCHS = 3


def single_process(device, *cell):
    """Do the same job without RPC and DDP, on one core and on all cores; return the figures of the faster run."""
    runs = []
    for threads in {1, host.usable_cores()}:
        torch.set_num_threads(threads)
        runs.append(train_alone(torch.device(device), *cell))
    return max(runs, key=lambda run: run["batches_per_second"])


def train_alone(device, num_embeddings, batch_bags, batches):
    """Train the same layers on the same data in this process, with sparse gradients; return its figures."""
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(num_embeddings, 16, mode="sum", sparse=True).to(device)
    fc = nn.Linear(16, NUM_CLASSES).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD([*bag.parameters(), *fc.parameters()], lr=0.05)
    log = ClickLog(num_embeddings, 16, seed=1, targets="random")

    def loss_of(ids, offsets, target):
        return criterion(fc(bag(ids.to(device), offsets.to(device))), target.to(device))

    for batch in log.batches(1, batch_bags, seed=0):
        loss_of(*batch).backward()  # not timed: a GPU loads its kernels at their first use
    seconds = 0.0
    for epoch in range(EPOCHS):
        log_batches = log.batches(2 * batches, batch_bags, seed=epoch)  # the batches of both trainers
        started = time.perf_counter()
        for batch in log_batches:
            optimizer.zero_grad()
            loss_of(*batch).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # wait for the GPU before reading the clock
        seconds += time.perf_counter() - started
    rate = EPOCHS * 2 * batches / seconds
    return {"batches_per_second": rate, "samples_per_second": rate * batch_bags}


def run(mode, rows, bags, batches, *words):
    """Run main.py on random targets, with `words` as further flags; return its summary."""
    return run_main("ddp_rpc", words_of(mode, rows, bags, batches, *words))


def words_of(mode, rows, bags, batches, *words):
    """Return the flags of main.py for one run."""
    sizes = ["--num_embeddings", rows, "--batch_bags", bags, "--batches", batches, "--epochs", EPOCHS]
    return ["--mode", mode, "--targets", "random", *sizes, *words]


def variants(args, *cell, servers=(1,), sparse=False):
    """Return {name: callable} for the variants of one table, as interleave needs it. `cell`: (rows, bags, batches).

    sparse: the modes get sparse gradients, and one more variant is hogwild with dense ones.
    """
    calls = {SINGLE: lambda: single_process("cpu", *cell)}
    if args.device == "cuda":
        calls[SINGLE + ", cuda"] = lambda: single_process("cuda", *cell)
    for number, mode in itertools.product(servers, MODES):
        for suffix, place in places(args.device).items():
            name = mode + (f", {number} servers" if number > 1 else "") + suffix
            words = ["--sparse"] if sparse else []
            ranks = ["--world_size", 2 + 1 + number, "--num_servers", number]  # two trainers
            calls[name] = functools.partial(run, mode, *cell, *ranks, *place, *words)
    if sparse:
        calls["hogwild, dense"] = functools.partial(run, "hogwild", *cell)
    return calls


def measured(args, title, figure, *cell, **choice):
    """Measure one table, print it, and return its numbers."""
    rows = interleave(variants(args, *cell, **choice), args.repeats)
    return table(rows, figure, baseline=SINGLE, title=title)


def wire_table():
    """Print the bytes that a trainer sends and receives per training step, by RPC and by the process group."""
    print("\nbytes per training step and trainer (--transport tcp)")
    print(f"{'mode':10} {'rows':>10} {'8 bags':>10} {'1024 bags':>10}")
    result = {}
    for mode, rows in itertools.product(MODES, (1_000, 1_000_000)):
        # Mode hogwild gets sparse gradients too: the bytes are the same, and a step does not update the whole table.
        runs = [run_counted("ddp_rpc", words_of(mode, rows, bags, 20, "--epochs", 1, "--sparse")) for bags in (8, 1024)]
        cell = result[f"{mode}, {rows} rows"] = [counted for _, counted in runs]
        print(f"{mode:10} {rows:10,} {cell[0]:10,} {cell[1]:10,}", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="which tables to measure")
    parser.add_argument("--repeats", type=flags.positive_int, default=3, help="runs of each variant, interleaved")
    device_help = "cuda: measure on the GPU as well as on the CPU"
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help=device_help)
    parser.add_argument("--json", metavar="FILE", help="write the raw numbers")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {host.usable_cores()} cores, 2 trainers, random targets, seed 1")
    raw = {}
    if "modes" in args.tables:
        title = "batches/s at about the tutorial's sizes: 8 bags, 100 rows"
        raw["modes"] = measured(args, title, "batches_per_second", 100, 8, 300, servers=(1, 2))
    for bags in (8, 64, 1024) if "bags" in args.tables else ():
        batches = 300 if bags < 1024 else 100
        title = f"samples/s with {bags} bags, 100 rows"
        raw[f"{bags} bags"] = measured(args, title, "samples_per_second", 100, bags, batches)
    for rows in (10**2, 10**3, 10**4, 10**5, 10**6) if "rows" in args.tables else ():
        batches = 200 if rows < 10**6 else 50
        title = f"batches/s with {rows:,} rows, 8 bags"
        raw[f"{rows} rows"] = measured(args, title, "batches_per_second", rows, 8, batches, sparse=True)
    if "wire" in args.tables:
        raw["wire"] = wire_table()
    write_json(args.json, raw)


if __name__ == "__main__":
    main()
