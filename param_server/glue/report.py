"""What a run prints and writes: lines, progress, curves, summary, picture; and the time that its steps take.

The Report is in the one process of a job that reports its result, a Meter in each rank that trains.
"""

import contextlib
import json
import math
import sys
import threading
import time

import torch
from tqdm import tqdm

from glue import UserError, say
from glue.checkpoint import write_aside

NOTHING_LEFT = "Nothing is left to do: the checkpoint is of a finished run."  # printed after "Going on after ..."

tqdm.set_lock(threading.RLock())  # tqdm's own lock is a system-wide semaphore, which a killed process leaves behind


class Report:
    """Collects the result of one run: say() and scalar() are called during the work, close() at the end."""

    def __init__(self, scenario, args):
        self.scenario, self.args = scenario, args
        self.started = time.perf_counter()
        self.curves = {}  # name -> ([x, ...], [y, ...])

    def say(self, text):
        """Print a line on stdout, above the progress bar if there is one."""
        with tqdm.external_write_mode():
            say(text)

    def progress(self, total=None, unit="step"):
        """Return a tqdm progress bar, which prints nothing if stderr is not a terminal."""
        return tqdm(total=total, unit=unit, leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty())

    def scalar(self, name, value, step):
        """Record one point of the curve `name`, for --summary_json and --plot."""
        steps, values = self.curves.setdefault(name, ([], []))
        steps.append(step)
        values.append(float(value))

    def close(self, plot, xlabel, floor=None, **figures):
        """Write --plot and --summary_json, with the scenario's own `figures` and all curves.

        `plot`: {label of the vertical axis: {name of a curve: its text in the legend}}; each axis gets a panel.
        `floor`: (label, value), drawn as a horizontal line in the last of these panels: a known bound or target.
        """
        args = self.args
        seconds = round(time.perf_counter() - self.started, 3)
        summary = {"scenario": self.scenario, "torch": torch.__version__, "wall_seconds": seconds} | figures
        summary |= {name: vars(args)[name] for name in ("mode", "world_size", "seed", "device", "restarts")}
        if args.summary_json:
            written = (summary | {"curves": self.curves}).items()
            lines = (f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in written)
            content = "{\n" + ",\n".join(lines) + "\n}\n"
            write_aside(args.summary_json, lambda file: file.write(content.encode()))
        if args.plot:
            write_aside(args.plot, lambda file: self._draw(file, plot, xlabel, floor))

    def _draw(self, file, plot, xlabel, floor):
        from matplotlib.figure import Figure  # a second to import, so only when asked for
        from matplotlib.ticker import MaxNLocator

        figure = Figure((7 if len(plot) == 1 else 5 * len(plot), 4), layout="constrained")
        panels = figure.subplots(1, len(plot), squeeze=False)[0]
        for axes, (ylabel, curves) in zip(panels, plot.items(), strict=True):
            for name, words in curves.items():
                axes.plot(*self.curves.get(name, ([], [])), label=words, linewidth=1.2, marker=".")
            axes.set(xlabel=xlabel, ylabel=ylabel)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
        if floor:
            panels[-1].axhline(floor[1], linestyle="--", color="gray", label=f"{floor[0]} ({floor[1]:.4g})")
        for axes in panels:
            axes.legend()
        figure.suptitle(f"{self.scenario}, mode {self.args.mode}, world size {self.args.world_size}", fontsize=11)
        figure.savefig(file, dpi=120, format="png")


class Meter:
    """Times the steps of a training loop, which puts each of them into a block `with meter.step():`."""

    def __init__(self, warm_up=0):
        """`warm_up`: how many steps at the beginning are not timed."""
        self.warm_up = warm_up
        self.steps = 0
        self.timed_steps = 0
        self.seconds = 0.0  # of the timed steps

    @contextlib.contextmanager
    def step(self):
        """Time the block, which is one step, and mark it for torch's profiler and for tools/trace.py."""
        started = time.perf_counter()
        with torch.profiler.record_function("step"):
            yield
        self.steps += 1
        if self.steps > self.warm_up:
            self.timed_steps += 1
            self.seconds += time.perf_counter() - started


def staleness_figures(counts):
    """Return the figures of a summary for staleness: the mean over all gradients, and the maximum.

    `counts`: {staleness: how many gradients had it}. Staleness is the number of updates between reading the weights
    for a gradient and applying the gradient.
    """
    total = sum(staleness * count for staleness, count in counts.items())
    mean = total / max(1, sum(counts.values()))
    return {"staleness_mean": round(mean, 3), "staleness_max": max(counts, default=0)}


def check_finite(value, what, step, at_most=math.inf):
    """Return `value` as a number; raise UserError if it shows that training has diverged.

    `value` is a number or a tensor with one element; `what`: its name for the user; `at_most`: the largest value of a
    training that has not diverged.
    """
    value = value.item() if isinstance(value, torch.Tensor) else value
    if not math.isfinite(value) or abs(value) > at_most:
        raise UserError(f"step {step}: the {what} is {value:g}: training has diverged, try a lower --lr")
    return value
