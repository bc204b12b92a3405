"""Measure param_server: images per second by mode and number of trainers, and of one process without RPC.

    python bench/param_server.py --data_dir data                               # about 20 minutes on 2 cores
    python bench/param_server.py --data_dir data --single 2 --max_batches 0    # accuracy of one process, with 2 threads

Every variant trains the same network on the same data with the same settings. If the folder of --data_dir has no MNIST,
the synthetic data set is used. The table names the data set.
"""

import functools
import itertools
import json
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from common import argument_parser, compare, places, run_main, use_package, write_json

use_package("param_server")

from glue import UserError
from glue.host import usable_cores
from glue.training import seed_for

from data import Batches, load_digits
from net import Net, get_accuracy

MODES = ("remote", "replica", "overlap", "bounded", "sync", "sharded")
SINGLE = "one process, 1 thread"


def train_in_one_process(args):
    """Train without RPC, with the same network, data order and evaluation; return the figures."""
    torch.set_num_threads(args.single)
    torch.manual_seed(seed_for(args.seed, "net"))
    device = torch.device(args.device)
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)
    digits = load_digits(args.dataset, args.data_dir, args.seed, train=True)
    batches = Batches(*digits, args.batch_size, args.seed, device)
    data, target = batches.get(0, 0)
    F.nll_loss(net(data), target).backward()  # not timed: a GPU loads its kernels at their first use
    started, seen = time.perf_counter(), 0
    for batch in range(min(batches.per_epoch, args.max_batches or batches.per_epoch)):
        data, target = batches.get(0, batch)
        optimizer.zero_grad()
        F.nll_loss(net(data), target).backward()
        optimizer.step()
        seen += len(target)
    if args.device == "cuda":
        torch.cuda.synchronize()  # wait for the GPU before reading the clock
    seconds = time.perf_counter() - started
    test_images, test_labels = load_digits(args.dataset, args.data_dir, args.seed, train=False)
    return {"images_per_second": seen / seconds, "test_accuracy": get_accuracy(net, test_images, test_labels)}


def singles(words, count=1, threads=1):
    """Run train_in_one_process in `count` processes at the same time; return the sum of their images/s."""
    command = [sys.executable, __file__, *map(str, words), "--single", str(threads)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    runs = [json.loads(process.communicate()[0]) for process in processes]
    return {"images_per_second": sum(run["images_per_second"] for run in runs)}


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--dataset", choices=["mnist", "synthetic"], help="default: mnist if --data_dir has it")
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_batches", type=int, default=150, help="of each trainer (150); 0: all")
    # The learning rate does not change the speed. With 0.03, four trainers in `overlap` would diverge, because their
    # gradients are late.
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--single", type=int, metavar="THREADS", help="only train in one process; print its figures")
    args = parser.parse_args()
    if args.dataset is None:
        try:
            load_digits("mnist", args.data_dir, args.seed, train=False)
            args.dataset = "mnist"
        except UserError:
            args.dataset = "synthetic"
    if args.single:
        print(json.dumps(train_in_one_process(args)))
        return
    words = ["--dataset", args.dataset, *(["--data_dir", args.data_dir] if args.dataset == "mnist" else [])]
    words += ["--batch_size", args.batch_size, "--max_batches", args.max_batches, "--lr", args.lr, "--seed", args.seed]
    variants = {
        SINGLE: functools.partial(singles, words),
        "one process, 2 threads": functools.partial(singles, words, threads=2),
        "two processes on their own": functools.partial(singles, words, count=2),
    }
    if args.device == "cuda":
        variants["one process, cuda"] = functools.partial(singles, [*words, "--device", "cuda"])
    for count, mode, (suffix, place) in itertools.product(args.trainers, MODES, places(args.device).items()):
        if count > 1 or mode in ("remote", "replica", "overlap"):  # with one trainer, bounded and sync are as replica
            job = ["--mode", mode, "--world_size", count + (2 if mode == "sharded" else 1), "--log_interval", 1_000_000]
            name = f"{mode}, {count} trainer{'s' * (count > 1)}{suffix}"
            variants[name] = functools.partial(run_main, "param_server", *words, *job, *place)
    title = f"images per second, {args.dataset}, {usable_cores()} cores, torch {torch.__version__}"
    write_json(args.json, compare(variants, args, "images_per_second", SINGLE, title))


if __name__ == "__main__":
    main()
