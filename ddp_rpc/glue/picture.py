"""A trace as a picture: a lane for each thread, dark where it works and pale where it waits, and the messages between.

Runs where timeline.py does, if `--trace` is a .png or .svg.
"""

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from glue.timeline import end_of

COLORS = {"waiting": "#c6dbec", "working": "#1d5b8c", "backward": "#7aa6c8"}  # the last: here, or in other processes
ARROW = {"arrowstyle": "-|>", "linewidth": 0.5, "mutation_scale": 5, "shrinkA": 0, "shrinkB": 0, "color": "black"}
STATES = {"backward": "backward", "run": "working", "step": "working", "work": "working"}  # by name or kind of a bar
PAPER = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6}  # below a name
MOST_CALLS = 60


def draw(file, kind, traces, steps=None, milliseconds=None):
    """Draw `traces`, {title: Chrome's events}, one below the other at one time scale.  `kind`: png or svg.

    `steps`: the first and the last to draw; without, one of median length, or what was before a failure.
    """
    windows = [choose_window(events, steps) for events in traces.values()]
    span = milliseconds * 1e3 if milliseconds else max(end - start for start, end in windows)  # in microseconds
    shown = [bars_of(events, start, start + span) for events, (start, _) in zip(traces.values(), windows, strict=True)]
    lanes = [len({(bar["pid"], bar["tid"]) for bar in bars}) for bars in shown]
    figure = Figure((10, 0.28 * sum(lanes) + 0.4 * len(lanes) + 0.4), layout="constrained")
    panels = figure.subplots(len(lanes), sharex=True, squeeze=False, height_ratios=lanes)[:, 0]
    for axes, title, bars, (start, _) in zip(panels, traces, shown, windows, strict=True):
        draw_panel(axes, traces[title], bars, start, span / 1e3)
        axes.set_title(title, loc="left", fontsize=9)
    panels[-1].set_xlabel("milliseconds", fontsize=8)
    keys = [Patch(color=color) for color in COLORS.values()]
    figure.legend(keys, COLORS, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(file, dpi=110, format=kind)


def bars_of(events, start=0.0, end=float("inf")):
    """Return the bars between two times, without torch's own RPCs."""
    bars = [event for event in events if event["ph"] == "X" and not event["name"].startswith("torch.rpc.")]
    return [bar for bar in bars if bar["ts"] < end and end_of(bar) > start]


def choose_window(events, wanted):
    """Return (start, end) of what to draw, see draw(): MOST_CALLS calls at most."""
    bars = bars_of(events)
    calls = [bar["ts"] for bar in bars if "to" in bar["args"]]
    steps = [bar for bar in bars if bar["cat"] == "step"]
    steps = [bar for bar in steps if bar["pid"] == steps[0]["pid"]]  # of one rank
    chosen = sorted(steps, key=lambda bar: bar["dur"])[len(steps) // 2 :][:1]
    if wanted:
        chosen = [bar for bar in steps if wanted[0] <= int(bar["name"].split()[1]) <= wanted[1]] or chosen
    elif not steps or any(event["ph"] == "i" for event in events):
        return [*calls[-20:], 0][0], max(map(end_of, bars), default=1)
    start, end = chosen[0]["ts"], end_of(chosen[-1])
    return start, [*[time for time in calls if start <= time < end][MOST_CALLS:], end][0]


def draw_panel(axes, events, bars, start, width):
    """Draw so many milliseconds of one trace, from `start` on: these bars, and the messages between them."""
    labels = [event for event in events if event["ph"] == "M"]
    named = {(label["pid"], label["tid"], label["name"]): label["args"]["name"] for label in labels}
    rows = {lane: row for row, lane in enumerate(sorted({(bar["pid"], bar["tid"]) for bar in bars}, reverse=True))}
    taken = {}  # row -> how far its last name reaches
    for bar in bars:
        row, begin, length = rows[bar["pid"], bar["tid"]], (bar["ts"] - start) / 1e3, bar["dur"] / 1e3
        state = STATES.get(bar["name"]) or STATES.get(bar["cat"], "waiting")
        edge = 0.4 if length > width / 200 else 0  # around a very short one it would be all that is seen
        axes.barh(row, length, 0.7, begin, color=COLORS[state], edgecolor="white", linewidth=edge)
        left, right, written = max(begin, 0), min(begin + length, width), 0.007 * width * (len(bar["name"]) + 1)
        if right - left > written and left >= taken.get(row, 0):
            taken[row] = left + written
            axes.text(left, row, f" {bar['name']}", fontsize=6.5, va="center", clip_on=True, bbox=PAPER)
    tails, tips = ([event for event in events if event["ph"] == kind] for kind in "sf")
    for ends in zip(tails, tips, strict=True):
        tail, tip = (((end["ts"] - start) / 1e3, rows.get((end["pid"], end["tid"]))) for end in ends)
        if 0 <= tail[0] < width and None not in tail + tip:
            axes.annotate("", tip, tail, arrowprops=ARROW, annotation_clip=False)
    for event in events:
        if event["ph"] == "i":  # how the job ended
            axes.set_title(event["name"], loc="right", fontsize=8, color="firebrick")
            axes.axvline((event["ts"] - start) / 1e3, color="firebrick", linewidth=2)
    ticks = [f"{named[pid, 0, 'process_name']}, {named[pid, tid, 'thread_name']}" for pid, tid in rows]
    axes.set_yticks([*rows.values()], ticks)
    axes.set(xlim=(0, width), ylim=(-0.6, len(rows) - 0.4))
    axes.tick_params(labelsize=7)
