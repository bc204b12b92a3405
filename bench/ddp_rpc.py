"""How many batches and samples per second each mode trains, beside a plain loop in one process; and bytes, and memory.

    python bench/ddp_rpc.py                        # everything: about 25 minutes on 2 cores
    python bench/ddp_rpc.py --tables modes --repeats 3 --json bench.json

Tables: modes (about the tutorial's sizes, 1 and 2 servers), bags (8, 64, 1024 in a batch), rows (10^2 to 10^6),
wire (bytes per step and trainer, over TCP alone), memory (of each server, as their number grows).
Rates are those of the training loop: start-up, making of data and evaluation are not in them, here and there.
"""

import argparse
import functools
import itertools
import time

import torch
from torch import nn, optim

from common import interleave, places, run_main, table, use_package, write_json

use_package("ddp_rpc")

from clicks import NUM_CLASSES, ClickLog
from glue import flags, tensors
from modes import MODES

SINGLE = "single process"
TABLES = ("modes", "bags", "rows", "wire", "memory")
EPOCHS = 3


def single_process(device, *cell):
    """Return the figures of the job without RPC and DDP, as fast as it gets: with one intra-op thread or all cores."""
    runs = []
    for threads in {1, tensors.usable_cores()}:
        torch.set_num_threads(threads)
        runs.append(train_alone(torch.device(device), *cell))
    return max(runs, key=lambda run: run["batches_per_second"])


def train_alone(device, num_embeddings, batch_bags, batches):
    """Train in this process alone, the same layers and data, sparse gradients; return its figures."""
    torch.manual_seed(1)
    bag = nn.EmbeddingBag(num_embeddings, 16, mode="sum", sparse=True).to(device)
    fc = nn.Linear(16, NUM_CLASSES).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD([*bag.parameters(), *fc.parameters()], lr=0.05)
    log = ClickLog(num_embeddings, 16, seed=1, targets="random")

    def loss_of(ids, offsets, target):
        return criterion(fc(bag(ids.to(device), offsets.to(device))), target.to(device))

    for batch in log.batches(1, batch_bags, seed=0):
        loss_of(*batch).backward()  # a GPU loads its kernels at their first use: that is not what is measured
    seconds = 0.0
    for epoch in range(EPOCHS):
        log_batches = log.batches(2 * batches, batch_bags, seed=epoch)  # what two trainers do together
        started = time.perf_counter()
        for batch in log_batches:
            optimizer.zero_grad()
            loss_of(*batch).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # the clock waits for the GPU's last step
        seconds += time.perf_counter() - started
    rate = EPOCHS * 2 * batches / seconds
    return {"batches_per_second": rate, "samples_per_second": rate * batch_bags}


def run(mode, rows, bags, batches, *words):
    """Run main.py on random targets, with these further flags; return its summary."""
    sizes = ["--num_embeddings", rows, "--batch_bags", bags, "--batches", batches, "--epochs", EPOCHS]
    return run_main("ddp_rpc", ["--mode", mode, "--targets", "random", *sizes, *words])


def variants(args, *cell, servers=(1,)):
    """Return name -> callable for one cell of a table, for interleave; cell is (rows, bags, batches)."""
    calls = {SINGLE: lambda: single_process("cpu", *cell)}
    if args.device == "cuda":
        calls[SINGLE + ", cuda"] = lambda: single_process("cuda", *cell)
    for number, mode in itertools.product(servers, MODES):
        for suffix, place in places(args.device).items():
            name = mode + (f", {number} servers" if number > 1 else "") + suffix
            calls[name] = functools.partial(run, mode, *cell, "--num_servers", number, *place)
    return calls


def measured(args, title, figure, *cell, **choice):
    """Run one cell of a table, print it, and return its numbers."""
    rows = interleave(variants(args, *cell, **choice), args.repeats)
    return table(rows, figure, baseline=SINGLE, title=title)


def wire_table():
    """Print the bytes that a trainer sends and receives per step, RPC and process group together."""
    print(f"\nbytes per step and trainer (--transport tcp)\n{'':10} {'rows':>10} {'8 bags':>10} {'1024 bags':>10}")
    result = {}
    for mode, rows in itertools.product(MODES, (1_000, 1_000_000)):
        # Sparse gradients in sync, too: the bytes are the same, and a step does not take the whole table's time.
        words = ["--epochs", 1, "--transport", "tcp", "--sparse"]
        runs = [run(mode, rows, bags, 20, *words) for bags in (8, 1024)]
        cell = result[f"{mode}, {rows} rows"] = [one["wire_bytes_per_step"] for one in runs]
        print(f"{mode:10} {rows:10,} {cell[0]:10,} {cell[1]:10,}", flush=True)
    return result


def memory_table(rows=4_000_000):
    """Print what one server holds as the table is divided among more of them."""
    print(f"\n10^6 bytes on each server, a table of {rows:,} x 16")
    print(f"{'servers':>8} {'table':>10} {'peak of process':>16}")
    result = {}
    for servers in (1, 2, 4):
        words = ["--epochs", 1, "--num_servers", servers, "--num_trainers", 1]
        held = result[servers] = run("pipelined", rows, 8, 5, *words)["server_megabytes"]
        print(f"{servers:8} {max(h[0] for h in held):10,.0f} {max(h[1] for h in held):16,.0f}", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="which tables to measure")
    parser.add_argument("--repeats", type=flags.positive_int, default=3, help="runs of each, interleaved")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: speed beside the CPU's")
    parser.add_argument("--json", metavar="FILE", help="write the raw numbers")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {tensors.usable_cores()} cores, 2 trainers, random targets, seed 1")
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
        raw[f"{rows} rows"] = measured(args, title, "batches_per_second", rows, 8, batches)
    if "wire" in args.tables:
        raw["wire"] = wire_table()
    if "memory" in args.tables:
        raw["memory"] = memory_table()
    write_json(args.json, raw)


if __name__ == "__main__":
    main()
