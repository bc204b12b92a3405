"""Measure param_server: images/s, bytes, accuracy and staleness, by mode and number of trainers.

    python bench/param_server.py --data_dir data                      # images/s and bytes: about 20 minutes on 2 cores
    python bench/param_server.py --data_dir data --tables accuracy    # accuracy and staleness: about 30 minutes

Every table includes one process without RPC, with the same network, data and settings. If the folder of --data_dir has
no MNIST, the synthetic data set is used. The first line of the output names the data set.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from bytes_per_step import run_counted
from common import interleave, places, run_main, table, use_package, write_json

use_package("param_server")

from data import Batches, load_digits
from glue import flags
from glue.host import keep_freed_memory, usable_cores
from glue.seeds import seed_for
from lead import get_accuracy
from net import Net

MODES = ("remote", "replica", "overlap", "bounded", "sync", "sharded")


def main():
    args = parse_args()
    if args.single:
        print(json.dumps(train_in_one_process(args)))
        return
    print(f"{args.dataset}, batch {args.batch_size} per trainer, torch {torch.__version__}, {usable_cores()} cores")
    tables = {"modes": speed_by_mode, "batch": speed_by_batch, "accuracy": accuracy_table}
    result = {name: tables[name](args) for name in args.tables}
    write_json(args.json, result)


def speed_by_mode(args):
    """Print images/s of each mode with 1, 2 and 4 trainers, and bytes per batch of two modes; return the runs."""
    variants = {f"one process, {threads} thread{'s' * (threads > 1)}": single(args, threads) for threads in (1, 2)}
    variants["two processes on their own"] = two_processes(args)
    if args.device == "cuda":
        variants["one process, cuda"] = single(args, 1, "--device", "cuda")
    for count in args.trainers:
        # With one trainer, replica, bounded and sync are the same.
        for mode in MODES if count > 1 else ("remote", "replica", "overlap"):
            for suffix, place in places(args.device).items():
                name = f"{mode}, {count} trainer{'s' * (count > 1)}{suffix}"
                # The learning rate does not change the speed. With 0.03, four trainers in `overlap` would diverge,
                # because their gradients are late.
                variants[name] = distributed(args, mode, count, "--lr", 0.01, *place)
    rows = interleave(variants, args.repeats)
    table(rows, "images_per_second", "one process, 1 thread", "images/s")
    print("\nBytes that a trainer sends and receives per batch, over TCP (--transport tcp)")
    print(f"{'variant':22} {'bytes':>12}")
    for mode in ("remote", "replica"):
        _, counted = run_counted("param_server", flags_of(args, mode, 1))
        print(f"{mode:22} {counted:12,}")
    return rows


def speed_by_batch(args):
    """Print images/s of two trainers with several batch sizes; return the runs.

    With small batches the messages take most of the time.
    """
    variants = {"one process, 1 thread": single(args, 1)}
    for batch in (8, 128):
        variants[f"one process, 1 thread, batch {batch}"] = single(args, 1, "--batch_size", batch)
        for mode in ("remote", "replica"):
            variants[f"{mode}, batch {batch}"] = distributed(args, mode, 2, "--batch_size", batch)
    rows = interleave(variants, args.repeats)
    table(rows, "images_per_second", "one process, 1 thread", "images/s, 2 trainers, by batch size")
    return rows


def accuracy_table(args):
    """Print the accuracy after one epoch and the staleness of the gradients, as means over seeds; return the runs."""
    rows = {}
    variants = [("one process", 1), ("one process, joined batch", 2), ("one process, joined batch", 4)]
    variants += [(mode, trainers) for trainers in (2, 4) for mode in MODES]
    variants.remove(("overlap", 4))  # with this learning rate it can diverge
    columns = f"{'trainers':>8} {'accuracy, mean':>15} {'accuracy by seed':>24} {'staleness mean':>15} {'its max':>7}"
    print(f"\n{'variant':26} {columns}")
    for name, trainers in variants:
        runs = []
        for seed in args.seeds:
            if name in MODES:
                runs.append(distributed(args, name, trainers, "--seed", seed)())
            else:
                runs.append(single(args, 2, "--batch_size", args.batch_size * trainers, "--seed", seed)())
        values = [each["test_accuracy"] for each in runs]
        stale = [each.get("staleness_mean", 0.0) for each in runs]
        worst = max(each.get("staleness_max", 0) for each in runs)
        print(
            f"{name:26} {trainers:8} {statistics.mean(values):15.4f} {' '.join(f'{v:.4f}' for v in values):>24} "
            f"{statistics.mean(stale):15.2f} {worst:7}",
            flush=True,
        )
        rows[f"{name}, {trainers}"] = runs
    return rows


def distributed(args, mode, trainers, *flags):
    """Return a callable that runs main.py with this many trainers and returns its summary."""
    return lambda: run_main("param_server", [*flags_of(args, mode, trainers), *flags])


def flags_of(args, mode, trainers):
    """Return the flags of main.py for one run."""
    servers = 2 if mode == "sharded" else 1
    job = ["--log_interval", 1_000_000, "--mode", mode, "--world_size", servers + trainers]
    return [*same_work(args), *job]


def single(args, threads, *flags):
    """Return a callable that runs train_in_one_process in a new process, with its own threads and memory."""
    return lambda: finish(start_single(args, threads, *flags))


def two_processes(args):
    """Return a callable that runs train_in_one_process twice at the same time, and adds up their images/s."""

    def both():
        runs = [finish(process) for process in [start_single(args, 1), start_single(args, 1)]]
        return {"images_per_second": sum(run["images_per_second"] for run in runs)}

    return both


def start_single(args, threads, *flags):
    """Start train_in_one_process in a new process; return the Popen."""
    command = [sys.executable, __file__, *map(str, (*same_work(args), "--single", threads, *flags))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process):
    """Wait for the process, and return the figures that it has printed."""
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(process.args)} ended with status {process.returncode}")
    return json.loads(out)


def same_work(args):
    """Return the flags that are the same for all variants, so that they do the same work."""
    data = ["--dataset", args.dataset, *(["--data_dir", args.data_dir] if args.dataset == "mnist" else [])]
    return [*data, "--batch_size", args.batch_size, "--max_batches", args.max_batches]


def train_in_one_process(args):
    """Train without RPC, with the same network, data order, malloc settings and evaluation; return the figures."""
    keep_freed_memory()
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


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--dataset", choices=["mnist", "synthetic"], help="default: mnist if --data_dir has it")
    parser.add_argument("--trainers", type=flags.positive_int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch_size", type=flags.positive_int, default=32)
    parser.add_argument("--max_batches", type=flags.non_negative_int, help="default: 150; for accuracy: all batches")
    parser.add_argument("--lr", type=flags.positive_float, default=0.03)
    parser.add_argument("--repeats", type=flags.positive_int, default=3)
    parser.add_argument("--tables", nargs="+", choices=["modes", "batch", "accuracy"], default=["modes", "batch"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of the accuracy table")
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--single", type=int, metavar="THREADS", help="only run the baseline and print its figures")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: table modes on CPU and GPU")
    parser.add_argument("--json", metavar="FILE", help="write the raw figures")
    args = parser.parse_args()
    if args.max_batches is None:
        args.max_batches = 0 if "accuracy" in args.tables else 150
    if args.dataset is None:
        try:
            args.dataset = "mnist"
            load_digits("mnist", args.data_dir, args.seed, train=False)
        except ValueError:
            args.dataset = "synthetic"
    return args


if __name__ == "__main__":
    main()
