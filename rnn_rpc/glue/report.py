"""What a run prints and writes: lines, progress, curves, summary, picture.

Runs in the one process of a job that reports its result.
"""

import json
import sys
import threading
import time

import torch
from tqdm import tqdm

from glue import UserError
from glue.checkpoint import write_aside

FEW_POINTS = 20  # a curve with at most so many points has a marker at each
NOTHING_LEFT = "Nothing is left to do: the checkpoint is of a finished run."  # printed after "Going on after ..."

tqdm.set_lock(threading.RLock())  # tqdm's own lock is a system-wide semaphore, which a killed process leaves behind


class Report:
    """Collects the result of one run: say() and scalar() are called during the work, close() at the end."""

    def __init__(self, scenario, args):
        self.scenario, self.args = scenario, args
        self.started = time.perf_counter()
        self.curves = {}  # name -> ([x, ...], [y, ...])
        self.writer = None
        if args.logdir:
            from torch.utils.tensorboard import SummaryWriter  # seconds to import, so only when asked for

            self.writer = SummaryWriter(args.logdir)

    def say(self, text):
        """Print a line on stdout, above the progress bar if there is one."""
        tqdm.write(text)
        sys.stdout.flush()

    def progress(self, total=None, unit="step"):
        """Return a tqdm progress bar, which prints nothing if stderr is not a terminal."""
        return tqdm(total=total, unit=unit, leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty())

    def scalar(self, name, value, step):
        """Record one point of the curve `name`, for --logdir and --plot."""
        steps, values = self.curves.setdefault(name, ([], []))
        steps.append(step)
        values.append(float(value))
        if self.writer:
            self.writer.add_scalar(name, value, step)

    def close(self, plot, xlabel, floor=None, counts=None, **figures):
        """Write --summary_json, which includes the scenario's own `figures`, and --plot.  Returns the summary.

        `plot`: {label of the vertical axis: {name of a curve: its text in the legend}}; each axis gets a panel.
        `floor`: (label, value), drawn as a horizontal line in the last of these panels: a known bound or target.
        `counts`: (label, {whole number: how often}), drawn as a histogram in a further panel.
        """
        args = self.args
        seconds = round(time.perf_counter() - self.started, 3)
        summary = {"scenario": self.scenario, "torch": torch.__version__, "wall_seconds": seconds} | figures
        summary |= {name: vars(args)[name] for name in ("mode", "world_size", "seed", "device", "restarts")}
        if self.writer:
            self.writer.close()
        if args.summary_json:
            content = json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n"  # JSON has no NaN
            write_aside(args.summary_json, lambda file: file.write(content))
        if args.plot:
            write_aside(args.plot, lambda file: self._draw(file, plot, xlabel, floor, counts))
        return summary

    def _draw(self, file, plot, xlabel, floor, counts):
        from matplotlib.figure import Figure  # a second to import, so only when asked for
        from matplotlib.ticker import MaxNLocator

        label, times = counts or ("", {})  # empty if the run had nothing left to do
        widths = [7 if len(plot) == 1 else 5] * len(plot) + [3.5] * bool(times)
        figure = Figure((sum(widths), 4), layout="constrained")
        panels = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
        for axes, (ylabel, curves) in zip(panels, plot.items(), strict=False):  # the histogram's panel is left over
            for name, words in curves.items():
                steps, values = self.curves.get(name, ([], []))
                axes.plot(steps, values, label=words, linewidth=1.2, marker="o" if len(steps) <= FEW_POINTS else None)
            axes.set(xlabel=xlabel, ylabel=ylabel)
        last = panels[len(plot) - 1]
        if floor:
            last.axhline(floor[1], linestyle="--", color="gray", linewidth=1, label=f"{floor[0]} ({floor[1]:.4g})")
        for axes in panels[: len(plot)]:
            axes.legend()
        if times:
            panels[-1].bar(list(times), list(times.values()))
            panels[-1].set(xlabel=label, ylabel="gradients")
            panels[-1].yaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in panels:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
        figure.suptitle(f"{self.scenario}, mode {self.args.mode}, world size {self.args.world_size}", fontsize=11)
        figure.savefig(file, dpi=120, format="png")


def staleness_figures(counts):
    """Return the figures of a summary for staleness: the mean over all gradients, and the maximum.

    `counts`: {staleness: how many gradients had it}.  Staleness is the number of updates between reading the weights
    for a gradient and applying the gradient.
    """
    gradients = sum(counts.values())
    total = sum(staleness * count for staleness, count in counts.items())
    mean = total / gradients if gradients else 0.0
    return {"staleness_mean": round(mean, 3), "staleness_max": max(counts, default=0)}


def check_finite(value, what, step, lower="--lr", at_most=float("inf")):
    """Return `value` as a number; raise UserError if it shows that training has diverged.

    `value` is a number or a tensor with one element; `what`: its name for the user; `lower`: the flag to lower.
    """
    value = value.item() if isinstance(value, torch.Tensor) else value
    if not abs(value) <= at_most or value in (float("inf"), float("-inf")):  # `not <=` is true for NaN as well
        raise UserError(f"step {step}: the {what} is {value:g}: training has diverged, try a lower {lower}")
    return value
