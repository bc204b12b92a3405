"""Draw learning curves from files of --summary_json: a panel for each scenario, and in it a line for each run.

    python tools/plot.py learning.png results/*.json      # run_all.sh does this
    python tools/plot.py curve.png run.json               # one run: all of its curves

The dashed line is the bound that the run itself names: a floor, a ceiling, or the threshold of an environment.
"""

import collections
import json
import sys

from matplotlib.figure import Figure

# Scenario -> (what the horizontal axis counts, {label of a vertical axis: {curve: its text}}, (text, key) of a bound).
# If several runs or scenarios are shown, each panel has the last curve of the last axis.
CURVES = {
    "rl_rpc": (
        "episode",
        {"reward of the lowest observer": {"reward/last": "one episode", "reward/running": "running reward"}},
        ("solved", "reward_threshold"),
    ),
    "rnn_rpc": (
        "epoch",
        {"perplexity (words)": {"perplexity/train": "training text", "perplexity/heldout": "held-out text"}},
        ("floor", "floor_perplexity"),
    ),
    "ddp_rpc": (
        "epoch",
        {"accuracy on held-out bags (fraction)": {"heldout/accuracy": "the model"}},
        ("the teacher's own", "ceiling_accuracy"),
    ),
    "param_server": (
        "updates of the weights",
        {"loss (nats)": {"loss": "training, one batch"}, "accuracy (fraction)": {"test accuracy": "test images"}},
        ("", None),
    ),
}


def main(picture, *files):
    runs = collections.defaultdict(list)  # scenario -> [summary]
    for name in files:
        summary = load(name)
        runs[summary["scenario"]].append(summary)
    alone = len(files) == 1
    panels = []  # (runs, horizontal axis, vertical axis, {curve: its text}, label of the bound, key of the bound)
    for scenario, its_runs in runs.items():
        xlabel, axes, bound = CURVES[scenario]
        for ylabel, curves in [*axes.items()][0 if alone else -1 :]:
            panels.append((its_runs, xlabel, ylabel, dict([*curves.items()][0 if alone else -1 :]), *bound))
    # A README is 830 pixels wide.
    figure = Figure((max(5.5, 3.3 * len(panels)), 3.4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, *panel, title=not alone)
    figure.savefig(picture, dpi=150)


def load(name):
    """Return the summary in this file, and its name. Ends the program if there is none."""
    try:
        with open(name) as file:
            summary = json.load(file) | {"file": name}
        if summary["scenario"] in CURVES:
            return summary
        why = f"it is of {summary['scenario']!r}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error
    print(f"plot.py: {name} is no file of --summary_json: {why}", file=sys.stderr)
    sys.exit(2)


def draw(axes, runs, xlabel, ylabel, curves, bound, key, title):
    """Draw a panel: the curves of one run, or one curve of several runs, which are then named by mode and file."""
    for run in runs:
        for name, text in curves.items():
            label = text if len(runs) == 1 else f"{run['mode']}, {run['world_size']} ranks ({run['file']})"
            steps, values = run["curves"].get(name, ([], []))
            line = "" if text.endswith(("one batch", "one episode")) else "-"  # neighbours do not follow each other
            marker = "" if line and len(steps) > 40 else "."  # so many points would hide the line
            axes.plot(steps, values, label=label, linestyle=line, linewidth=1.2, marker=marker)
    for value in {run[key] for run in runs if key and run.get(key) is not None}:
        axes.axhline(value, color="gray", linestyle="--", label=f"{bound} ({value:.4g})")
    axes.set(xlabel=xlabel, ylabel=ylabel, title=runs[0]["scenario"] if title else "")
    axes.locator_params(axis="x", nbins=5, integer=True)
    axes.legend(fontsize=8, title=text if len(runs) > 1 else None, title_fontsize=8)
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
