"""What a run tells: lines, progress, curves, summary, picture.

Runs in the one process of a job that reports its result.
"""

import json
import sys
import threading
import time

import torch
from tqdm import tqdm

from glue.checkpoint import write_aside

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
        args, seconds = self.args, round(time.perf_counter() - self.started, 3)
        summary = {"scenario": self.scenario, "torch": torch.__version__, "wall_seconds": seconds} | figures
        summary |= {name: vars(args)[name] for name in ("mode", "world_size", "seed", "device", "restarts")}
        if self.writer:
            self.writer.close()
        if args.summary_json:
            content = json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n"  # JSON has no NaN
            write_aside(args.summary_json, lambda file: file.write(content))
        if args.plot:
            write_aside(args.plot, lambda file: self._draw(file, plot or tuple(self.curves), floor, xlabel))
        return summary

    def _draw(self, file, names, floor, xlabel):
        import matplotlib

        matplotlib.use("Agg")  # no screen needed
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for name in names:
            steps, values = self.curves.get(name, ([], []))
            axes.plot(steps, values, label=name, linewidth=1.2, marker="o" if len(steps) == 1 else None)
        if floor:
            axes.axhline(floor[1], linestyle="--", color="gray", linewidth=1, label=f"{floor[0]} ({floor[1]:.4g})")
        axes.set(title=f"{self.scenario}, mode {self.args.mode}, world size {self.args.world_size}", xlabel=xlabel)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(file, dpi=120, format="png")
        pyplot.close(figure)


def check_finite(value, what, step, lower="--lr", at_most=float("inf")):
    """Return `value` (a number, or a tensor of one); raise ValueError, one line for the user, if training diverged."""
    value = value.item() if isinstance(value, torch.Tensor) else value
    if not abs(value) <= at_most or value in (float("inf"), float("-inf")):  # NaN is not less than anything
        raise ValueError(f"step {step}: the {what} is {value:g}: training has diverged, try a lower {lower}")
    return value
