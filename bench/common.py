"""What the programs in bench/ share: they run a package's main.py and other variants in turn, and print a table."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from tqdm import tqdm

ROOT = pathlib.Path(__file__).resolve().parent.parent


def use_package(package):
    """Let this process import the modules of a package, and give it the malloc settings that each rank has.

    They change the speed of training with large tensors, so a baseline without them would be too slow.
    """
    sys.path.insert(0, str(ROOT / package))
    from glue.host import keep_freed_memory

    keep_freed_memory()


def argument_parser(description):
    """Return a parser with the flags of all these programs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds; each runs every variant once (3)")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    device_help = "cuda: measure on the GPU as well as on the CPU"
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help=device_help)
    parser.add_argument("--json", metavar="FILE", help="write the figures of every run")
    return parser


def run_main(package, *words):
    """Run the package's main.py with these flags; return its summary."""
    with tempfile.TemporaryDirectory() as folder:
        summary = pathlib.Path(folder, "summary.json")
        command = [sys.executable, ROOT / package / "main.py", *words, "--summary_json", summary]
        subprocess.run([str(word) for word in command], stdout=subprocess.DEVNULL, timeout=900, check=True)
        return json.loads(summary.read_text())


def places(device):
    """Return {suffix of a variant's name: flags} for the CPU, and also for the GPU if `device` is "cuda"."""
    found = {"": ["--device", "cpu"]}
    if device == "cuda":
        found[", cuda"] = ["--device", "cuda"]
    return found


def compare(variants, args, figure, baseline, title):
    """Measure each of `variants`, {name: a callable that returns figures}, and print a table of one figure.

    Return {name: the figures of its runs}. The variants take turns, A B C A B C ..., because the speed of a shared
    machine changes over time. The runs of one round can be compared, so a ratio divides the figures of one round.
    """
    rows = {name: [] for name in variants}
    with tqdm(total=args.repeats * len(variants), leave=False, disable=not sys.stderr.isatty()) as bar:
        for _ in range(args.repeats):
            for name, measure in variants.items():
                bar.set_postfix_str(name)
                rows[name].append(measure())
                bar.update()
    width = max(map(len, rows))
    print(f"\n{title}\n{'variant':{width}} {'median':>12} {'min - max':>23} {'ratio to ' + baseline:>32}")
    for name, runs in rows.items():
        values = [run[figure] for run in runs]
        ratios = [run[figure] / base[figure] for run, base in zip(runs, rows[baseline], strict=True)]
        span, spread = f"{min(values):,.0f} - {max(values):,.0f}", f"({min(ratios):.2f} - {max(ratios):.2f})"
        median, ratio = statistics.median(values), statistics.median(ratios)
        print(f"{name:{width}} {median:12,.0f} {span:>23} {ratio:12.2f} {spread}", flush=True)
    return rows


def write_json(path, numbers):
    """Write the numbers to the file `path`, the value of --json, if there is one."""
    if path:
        pathlib.Path(path).write_text(json.dumps(numbers, indent=2))
