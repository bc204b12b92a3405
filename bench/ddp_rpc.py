"""Measure ddp_rpc: batches per second of each mode and of one process without RPC.

    python bench/ddp_rpc.py                              # about the tutorial's sizes: five minutes on 2 cores
    python bench/ddp_rpc.py --bags 64                    # a larger batch
    python bench/ddp_rpc.py --rows 1000000 --sparse      # a larger table, and sparse gradients

There are two trainers. Speeds are those of the training loop. Start-up, the making of data, and evaluation are not
timed.
"""

import functools
import itertools
import time

import torch
from torch import nn, optim

from common import argument_parser, compare, places, run_main, use_package, write_json

use_package("ddp_rpc")

from glue import host

from clicks import NUM_CLASSES, ClickLog
from main import MODES

SINGLE = "single process"
EPOCHS = 3


def single_process(args, device="cpu"):
    """Do the same job without RPC and DDP, on one core and on all cores; return the figures of the faster run."""
    runs = []
    for threads in {1, host.usable_cores()}:
        torch.set_num_threads(threads)
        runs.append(train_alone(args, torch.device(device)))
    return max(runs, key=lambda run: run["batches_per_second"])


def train_alone(args, device):
    """Train the same layers on the same data in this process, with sparse gradients; return its figures."""
    torch.manual_seed(args.seed)
    bag = nn.EmbeddingBag(args.rows, 16, mode="sum", sparse=True).to(device)
    fc = nn.Linear(16, NUM_CLASSES).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD([*bag.parameters(), *fc.parameters()], lr=0.05)
    log = ClickLog(args.rows, 16, seed=args.seed, targets="random")

    def loss_of(ids, offsets, target):
        return criterion(fc(bag(ids.to(device), offsets.to(device))), target.to(device))

    for batch in log.batches(1, args.bags, seed=0):
        loss_of(*batch).backward()  # not timed: a GPU loads its kernels at their first use
    seconds = 0.0
    for epoch in range(EPOCHS):
        batches = log.batches(2 * args.batches, args.bags, seed=epoch)  # those of both trainers
        started = time.perf_counter()
        for batch in batches:
            optimizer.zero_grad()
            loss_of(*batch).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # wait for the GPU before reading the clock
        seconds += time.perf_counter() - started
    return {"batches_per_second": EPOCHS * 2 * args.batches / seconds}


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--bags", type=int, default=8, help="in a batch (8)")
    parser.add_argument("--rows", type=int, default=100, help="of the embedding table (100)")
    parser.add_argument("--batches", type=int, default=300, help="of each trainer in an epoch (300)")
    parser.add_argument("--servers", type=int, nargs="+", default=[1], metavar="S", help="numbers of servers")
    parser.add_argument(
        "--sparse", action="store_true", help="sparse gradients; one more variant is hogwild with dense"
    )
    args = parser.parse_args()
    words = ["--num_embeddings", args.rows, "--batch_bags", args.bags, "--batches", args.batches, "--epochs", EPOCHS]
    run = functools.partial(run_main, "ddp_rpc", *words, "--targets", "random", "--seed", args.seed)
    variants = {SINGLE: functools.partial(single_process, args)}
    if args.device == "cuda":
        variants[SINGLE + ", cuda"] = functools.partial(single_process, args, "cuda")
    sparse = ["--sparse"] if args.sparse else []
    for servers, mode, (suffix, place) in itertools.product(args.servers, MODES, places(args.device).items()):
        ranks = ["--world_size", 3 + servers, "--num_servers", servers]
        name = f"{mode}, {servers} server{'s' * (servers > 1)}{suffix}"
        variants[name] = functools.partial(run, "--mode", mode, *ranks, *place, *sparse)
    if args.sparse:
        variants["hogwild, dense"] = functools.partial(run, "--mode", "hogwild")
    title = f"batches per second, {args.bags} bags, {args.rows:,} rows, {host.usable_cores()} cores"
    write_json(args.json, compare(variants, args, "batches_per_second", SINGLE, title))


if __name__ == "__main__":
    main()
