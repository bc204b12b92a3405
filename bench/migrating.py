"""Measure the parameter server in torch RPC, in Ray and in Monarch: images/s and accuracy, for docs/MIGRATING.md.

    python bench/migrating.py --ray_python ray-env/bin/python --monarch_python monarch-env/bin/python

The measurement takes about 7 minutes on 2 cores. Every program trains the same network for one epoch on the same
images, in batches of 32. single.py trains in one process with one thread, and the other programs have two trainers.
The programs are run in turn. Time is measured from the start of training, when all data has been loaded, until the
last trainer has ended. Without --data_dir, the images are 19,200 digits that this program draws from a seed.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from common import ROOT, interleave, run_main, table, use_package, write_json

use_package("param_server")

PROGRAMS = ROOT / "docs" / "migrating"


def main():
    args = parse_args()
    if args.inside:
        {"single": time_single, "tutorial": time_tutorial}[args.inside](args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.data_dir = os.path.abspath(args.data_dir) if args.data_dir else draw_mnist(folder)
        variants = {
            "one process, single.py": lambda: run_here(args, "single"),
            "torch RPC, tutorial.py": lambda: run_here(args, "tutorial"),
            "torch RPC, main.py --mode replica": lambda: run_replica(args),
        }
        programs = {"ray_parameter_server.py": args.ray_python, "monarch_parameter_server.py": args.monarch_python}
        for program, python in programs.items():
            if python:
                variants[program] = lambda command=(python, PROGRAMS / program): run_program(args, command)
            else:
                print(f"{program} is left out, because no Python with its library is given")
        rows = interleave(variants, args.repeats)
    table(rows, "images_per_second", "torch RPC, tutorial.py", "images/s")
    table(rows, "test_accuracy", "torch RPC, tutorial.py", "accuracy on held-out digits", digits=4)
    write_json(args.json, rows)


def draw_mnist(folder):
    """Draw digits and write them into `folder` in the format of torchvision's MNIST; return the folder."""
    from data import FILES, draw_digits

    raw = pathlib.Path(folder) / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for train, names in FILES.items():
        for name, array in zip(names, draw_digits(19_200 if train else 2_000, seed=1 + train), strict=True):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            (raw / name).write_bytes(bytes([0, 0, 8, array.dim()]) + sizes + array.byte().numpy().tobytes())
    return folder


# --------------------------------------------------------------- each function of this part returns a variant's figures


def run_replica(args):
    flags = ["--mode", "replica", "--world_size", 3, "--dataset", "mnist", "--data_dir", args.data_dir]
    summary = run_main("param_server", [*flags, "--lr", 0.03, "--log_interval", 1_000_000])
    return {figure: summary[figure] for figure in ("images_per_second", "test_accuracy")}


def run_program(args, command):
    """Run a program of docs/migrating and read the images/s that it prints. `command`: its Python and its path."""
    out = run([*command, "--dataset", "mnist", "--data_dir", args.data_dir])
    return {"images_per_second": float(re.search(r" ([\d.]+) images/s", out)[1]), "test_accuracy": accuracy_in(out)}


def run_here(args, program):
    """Run tutorial.py or single.py of param_server, and measure the training loop, because they print no times."""
    out = run([sys.executable, __file__, "--inside", program, "--data_dir", args.data_dir])
    times = [json.loads(line) for line in re.findall(r'^\{"images".*\}$', out, re.MULTILINE)]
    seconds = max(each["ended"] for each in times) - min(each["started"] for each in times)
    images = sum(each["images"] for each in times)
    return {"images_per_second": images / seconds, "test_accuracy": accuracy_in(out)}


def run(command):
    """Run a command and return what it prints. Raises RuntimeError if the command fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{command} ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def accuracy_in(out):
    return float(re.findall(r"^Accuracy ([\d.]+)", out, re.MULTILINE)[-1])  # of the trainer that ends last


# ------------------------------------------------------------------------------- measuring the time of a training loop


def with_clock(program):
    """Let tutorial.py or single.py print when its training begins and ends."""
    run_training_loop, get_accuracy = program.run_training_loop, program.get_accuracy
    times = {}

    def timed_loop(*arguments):
        # time.time() is the same clock in all processes of this machine.
        times.update(images=len(arguments[-2].dataset), started=time.time())
        run_training_loop(*arguments)

    def timed_accuracy(*arguments):  # the training loop calls it when the training is over
        print(json.dumps(times | {"ended": time.time()}) + "\n", end="", flush=True)
        get_accuracy(*arguments)

    program.run_training_loop, program.get_accuracy = timed_loop, timed_accuracy


def time_single(args):
    import torch

    import single

    torch.set_num_threads(1)
    torch.manual_seed(1)
    args.dataset, args.seed, args.num_gpus = "mnist", 1, 0
    with_clock(single)
    single.run_worker(args)


def time_tutorial(args):
    import torch.multiprocessing as mp

    from jobs import free_port

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(free_port())
    args.dataset, args.seed, args.num_gpus, args.world_size = "mnist", 1, 0, 3
    mp.spawn(run_tutorial_worker, args=(args,), nprocs=args.world_size)


def run_tutorial_worker(rank, args):
    import torch

    import tutorial

    torch.set_num_threads(1)  # as in the other programs that are compared
    with_clock(tutorial)
    tutorial.run_rank(rank, args)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray_python", default=os.environ.get("RAY_PYTHON"), help="a Python that has Ray")
    parser.add_argument("--monarch_python", default=os.environ.get("MONARCH_PYTHON"), help="a Python that has Monarch")
    parser.add_argument("--data_dir", help="folder with MNIST, to be used instead of drawn digits")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write the raw figures")
    parser.add_argument("--inside", choices=["single", "tutorial"], help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
