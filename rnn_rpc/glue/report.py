"""What a run prints and writes: lines, a progress bar, curves, and the summary. In the one process that reports."""

import json
import sys
import threading
import time

from glue.checkpoint import write_file

import torch
from tqdm import tqdm

tqdm.set_lock(threading.RLock())  # tqdm's own lock is a system-wide semaphore, which a killed process leaves behind


class Report:
    """Collects the result of one run: say(), bar and scalar() during the work, close() at the end."""

    def __init__(self, package, args, total=None, unit="step"):
        """`total`, `unit`: of the progress bar, `bar`, which prints nothing if stderr is not a terminal."""
        self.package, self.args = package, args
        self.started = time.perf_counter()
        self.curves = {}  # name -> ([x, ...], [y, ...])
        hidden = not sys.stderr.isatty()
        self.bar = tqdm(total=total, unit=unit, leave=False, dynamic_ncols=True, disable=hidden)

    def say(self, text):
        """Print a line on stdout, above the progress bar if there is one."""
        with tqdm.external_write_mode():
            print(text)

    def going_on(self, after, done):
        """Say after what a resumed run goes on. `done`: the run had finished."""
        self.say(f"Going on after {after}.")
        if done:
            self.say("Nothing is left to do: the checkpoint is of a finished run.")

    def scalar(self, name, value, step):
        """Record one point of the curve `name`, for --summary_json."""
        steps, values = self.curves.setdefault(name, ([], []))
        steps.append(step)
        values.append(float(value))

    def close(self, **figures):
        """Write --summary_json, with the scenario's own `figures` and all curves."""
        self.bar.close()
        seconds = round(time.perf_counter() - self.started, 3)
        summary = {"scenario": self.package, "torch": torch.__version__, "wall_seconds": seconds} | figures
        summary |= {name: vars(self.args)[name] for name in ("mode", "world_size", "seed", "device", "restarts")}
        summary["curves"] = self.curves
        if self.args.summary_json:
            write_file(self.args.summary_json, json.dumps(summary, indent=1, allow_nan=False).encode() + b"\n")
