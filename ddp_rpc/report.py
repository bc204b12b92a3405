"""What a run tells and keeps: lines, progress, curves, summary, checkpoint.  (The same file in all four packages.)

Runs in the one process of a job that reports its result, and in bench.py.
"""

import hashlib
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import torch
from tqdm import tqdm

tqdm.set_lock(threading.RLock())  # tqdm's own lock is a system-wide semaphore, which a killed process leaves behind


class Report:
    """The result of one run, as it grows: say() and scalar() while it works, close() at the end."""

    def __init__(self, scenario, args):
        self.scenario, self.args = scenario, args
        self.started = time.perf_counter()
        self.curves = {}  # name -> ([step, ...], [value, ...])
        self.writer = None
        if args.logdir:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import, so only when asked for

            self.writer = SummaryWriter(args.logdir)

    def say(self, text):
        """Print a line on stdout, above the progress bar if there is one."""
        tqdm.write(text)
        sys.stdout.flush()

    def progress(self, total=None, unit="step"):
        """Return a tqdm bar on a terminal; piped, it stays silent."""
        return tqdm(total=total, unit=unit, leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty())

    def scalar(self, name, value, step):
        """Note one point of a curve, for --logdir and --plot."""
        steps, values = self.curves.setdefault(name, ([], []))
        steps.append(step)
        values.append(float(value))
        if self.writer:
            self.writer.add_scalar(name, value, step)

    def close(self, plot=(), floor=None, xlabel="step", **figures):
        """Write --summary_json (with the scenario's own `figures`) and --plot (the curves named in `plot`).

        `floor` is a (label, value) pair: a horizontal line for a known bound or target.  Returns the summary.
        """
        args = self.args
        summary = {
            "scenario": self.scenario, "mode": args.mode, "world_size": args.world_size, "seed": args.seed,
            "device": args.device, "torch": torch.__version__, "restarts": args.restarts,
            "wall_seconds": round(time.perf_counter() - self.started, 3),
        } | figures  # fmt: skip
        if self.writer:
            self.writer.close()
        if args.summary_json:
            write_aside(args.summary_json, lambda path: _dump_json(summary, path))
        if args.plot:
            write_aside(args.plot, lambda path: self._draw(path, plot or tuple(self.curves), floor, xlabel))
        return summary

    def _draw(self, path, names, floor, xlabel):
        import matplotlib

        matplotlib.use("Agg")  # no screen needed
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for name in names:
            axes.plot(*self.curves.get(name, ([], [])), label=name, linewidth=1.2)
        if floor:
            axes.axhline(floor[1], linestyle="--", color="gray", linewidth=1, label=f"{floor[0]} ({floor[1]:.4g})")
        axes.set(title=f"{self.scenario}, mode {self.args.mode}, world size {self.args.world_size}", xlabel=xlabel)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=120, format="png")
        pyplot.close(figure)


def seed_for(seed, *parts):
    """Return a 63-bit seed for one stream of random numbers: from --seed and, say, a rank; well mixed, repeatable."""
    text = ",".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


# ---------------------------------------------------------------------------------------------------- checkpoints


def write_aside(path, write):
    """Call `write(path.part)`, then rename: kill -9 at any moment leaves the old file or the new one, never half."""
    aside = f"{path}.part"
    write(aside)
    with open(aside, "rb+") as file:
        os.fsync(file.fileno())  # the bytes are on the disk before the name points at them
    os.replace(aside, path)


def save_checkpoint(path, scenario, state):
    """Write `state` (tensors, numbers, strings, lists, dicts) to `path`, whole or not at all."""
    write_aside(path, lambda aside: torch.save({"scenario": scenario, "state": state}, aside))


def load_checkpoint(args, scenario):
    """Return the state saved at --checkpoint, or None when this run does not go on from one.

    Nothing in the file is executed (weights_only=True).  Raises ValueError, with one line for the user, if the file
    is missing, damaged, or another scenario's.
    """
    path = args.checkpoint
    if not args.resume:
        return None
    if args.restarts and not (path and os.path.exists(path)):
        print("No checkpoint: starting afresh.", flush=True)
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wonders aloud about a file that is not its own; we say what it is
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"--resume: there is no checkpoint {path}") from None
    except Exception as error:  # zip, pickle and torch each have their own for a file that is not one
        raise ValueError(f"{path} is not a readable checkpoint ({type(error).__name__})") from error
    if not isinstance(saved, dict) or saved.get("scenario") != scenario or not isinstance(saved.get("state"), dict):
        raise ValueError(f"{path} is not a checkpoint of {scenario}")
    return saved["state"]


# ----------------------------------------------------------------------------------------------------- measurements


def wire_bytes():
    """Return how many bytes this process has sent and received over TCP so far, on all sockets that are open now.

    The kernel counts them (Linux, tcp(7): TCP_INFO).  With `--transport tcp` that is everything RPC moves; the other
    transports move tensors between processes of one host through memory.
    """
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        if not _is_socket(descriptor):
            continue
        connection = socket.socket(fileno=os.dup(int(descriptor)))
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += sum(struct.unpack_from("QQ", information, 120))  # tcpi_bytes_acked, tcpi_bytes_received
    return total


def _is_socket(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:  # closed since it was listed
        return False


def run_main(package_dir, flags, timeout=900):
    """Run `main.py` with these flags in a process of its own; return its summary.  Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        summary = os.path.join(folder, "summary.json")
        command = [sys.executable, os.path.join(package_dir, "main.py"), *map(str, flags), "--summary_json", summary]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()}")
        with open(summary) as file:
            return json.load(file)


def places(device):
    """What a bench.py runs each mode on, as {suffix of the variant's name: flags}.

    For "cuda": the CPU of the same machine, the GPU, and the GPU with tensors that cross the wire by way of the CPU.
    """
    flags = {"": ["--device", "cpu"]}
    if device == "cuda":
        flags |= {", cuda": ["--device", "cuda"], ", cuda, --wire cpu": ["--device", "cuda", "--wire", "cpu"]}
    return flags


def interleave(variants, repeats=3):
    """Call each of `variants` (name -> callable returning a dict of figures) in turn, `repeats` times: A B C A B C ...

    Interleaved, because a shared machine's speed drifts: what is compared is measured at nearly the same time.
    """
    rows = {name: [] for name in variants}
    with tqdm(total=repeats * len(variants), leave=False, disable=not sys.stderr.isatty()) as bar:
        for _ in range(repeats):
            for name, measure in variants.items():
                bar.set_postfix_str(name)
                rows[name].append(measure())
                bar.update()
    return rows


def table(rows, figure, baseline, title=None, digits=0):
    """Print each variant's median, spread and ratio to `baseline` (pair by pair); return the numbers."""
    width = max(len(name) for name in rows)
    print(f"\n{title or figure}\n{'':{width}} {'median':>12} {'min - max':>23} {'ratio to ' + baseline:>32}")
    result = {}
    for name, runs in rows.items():
        values = [run[figure] for run in runs]
        ratios = [run[figure] / base[figure] for run, base in zip(runs, rows[baseline], strict=True)]
        median, ratio = statistics.median(values), statistics.median(ratios)
        span = f"{min(values):,.{digits}f} - {max(values):,.{digits}f}"
        print(f"{name:{width}} {median:12,.{digits}f} {span:>23} {ratio:12.2f} ({min(ratios):.2f} - {max(ratios):.2f})")
        result[name] = {"median": median, "values": values, "ratio": ratio, "ratios": ratios}
    sys.stdout.flush()
    return result


def _dump_json(value, path):
    with open(path, "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
