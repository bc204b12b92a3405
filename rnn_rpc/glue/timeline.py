"""What `--trace FILE` leaves: all ranks' bars on one time line, for ui.perfetto.dev or as a picture, and a table.

Runs in the one process of a job that writes it: the starting process, or rank 0 of ranks started one by one.  The
picture has a lane for each thread, dark where it works and pale where it waits, and the messages between them.
"""

import collections
import contextlib
import json
import os
import statistics
import zlib
from datetime import timedelta

from glue import ending
from glue.checkpoint import write_aside

LANES = ("main thread", "calls in flight", "RPC thread", "answers owed")  # of a rank, from above
NO_THREAD = {"async": LANES[1], "remote": LANES[1], "held": LANES[3]}  # kinds of bars for which no thread waits

COLORS = {"waiting": "#c6dbec", "working": "#1d5b8c", "backward": "#7aa6c8"}  # the last: here, or in other processes
STATES = {"backward": "backward", "run": "working", "step": "working", "work": "working"}  # by name or kind of a bar
ARROW = {"arrowstyle": "-|>", "linewidth": 0.5, "mutation_scale": 5, "shrinkA": 0, "shrinkB": 0, "color": "black"}
PAPER = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6}  # below a name
MOST_CALLS = 60  # in a picture


def collect(path, window, store, names, end=None, patience=0):
    """Write --trace from what the ranks hand in (waiting so many seconds for it), and print a table.

    `window`: the first and the last step to draw, or None; `names`: all workers'; `end`: the End of a job whose work is
    not done.  Raises OSError.
    """
    parts = _handed_in(store, len(names), end, patience)
    bars = [bar for part in parts.values() for bar in part["bars"]]
    hosts = {rank: part["host"] for rank, part in parts.items()}
    calls = join(bars)
    clocks = line_up(calls, hosts)
    for bar in bars:
        shift, _ = clocks[hosts[bar["pid"]]]
        bar["ts"] += shift
    print(table(names, calls))
    for host, (shift, error) in clocks.items():
        if error:
            print(f"The clock of {host} was put right by {shift / 1e6:+.3f} ms, give or take {error / 1e6:.3f} ms.")
    for rank, part in parts.items():
        if part["full"]:
            print(f"--trace: {names[rank]} had more to record, these are the last {len(part['bars']):,} bars.")
    events = lay_out(names, bars, {rank: part["main"] for rank, part in parts.items()}) + arrows(calls)
    if end:
        last = max(map(end_of, bars), default=0)
        events.append({"ph": "i", "s": "g", "name": f"rank {end.rank}: {end.why}", "pid": 0, "tid": 0, "ts": last})
    in_microseconds(events)
    kind = os.path.splitext(path)[1]
    if kind in (".png", ".svg"):
        write_aside(path, lambda file: draw(file, kind[1:], {"": events}, window))
    else:
        text = '{"traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n"
        write_aside(path, lambda file: file.write(text.encode()))


def _handed_in(store, world_size, end, patience):
    """Return {rank: what it has handed in}, of those that have."""
    lost = set(ending.lost(store))
    if end and end.kind == "lost":
        lost.add(end.rank)
    keys = {rank: f"trace/{rank}" for rank in range(world_size)}
    if patience:
        with contextlib.suppress(RuntimeError):  # another is lost as well
            store.wait([key for rank, key in keys.items() if rank not in lost], timedelta(seconds=patience))
    return {rank: json.loads(zlib.decompress(store.get(key))) for rank, key in keys.items() if store.check([key])}


def in_microseconds(events):
    """Turn the events' nanoseconds into the format's microseconds, from the first bar on."""
    zero = min((event["ts"] for event in events if event["ph"] == "X"), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - zero) / 1e3
        if "dur" in event:
            event["dur"] /= 1e3


def end_of(bar):
    return bar["ts"] + bar["dur"]


def join(bars):
    """Return (call, run, answered) of each call whose both sides are known: the caller's bar, and the callee's.

    With the end of `answered` the answer leaves: `run`, or the bar of a Future that was completed later.
    """
    made, served, held = {}, {}, {}  # number of the call -> bar
    for bar in bars:
        number = bar["args"].get("call")
        if "to" in bar["args"]:
            made[number] = bar
        elif bar["cat"] == "run":
            served[number] = bar
        elif bar["cat"] == "held":
            held[number] = bar
    return [(made[number], run, held.get(number, run)) for number, run in served.items() if number in made]


def line_up(calls, hosts):
    """Return {host: (ns to add to its clock, by how much that may be wrong)}; the clock of the first host is right.

    A call is served after it was sent, and before its answer is there: both bound the difference of two clocks.
    """
    bounds = {}  # (host, other host) -> (lowest, highest) number of ns to add to the other's clock
    for call, run, answered in calls:
        one, other = hosts[call["pid"]], hosts[run["pid"]]
        low = call["ts"] - run["ts"]
        high = end_of(call) - end_of(answered)
        _narrow(bounds, (one, other), low, high)
        _narrow(bounds, (other, one), -high, -low)
    clocks = dict.fromkeys(list(hosts.values())[:1], (0, 0))
    for _ in hosts:  # from one host to the next
        for (one, other), (low, high) in bounds.items():
            if one in clocks and other not in clocks:
                shift, error = clocks[one]
                clocks[other] = shift + (low + high) // 2, error + abs(high - low) // 2
    return dict.fromkeys(hosts.values(), (0, 0)) | clocks


def _narrow(bounds, pair, low, high):
    lowest, highest = bounds.get(pair, (low, high))
    bounds[pair] = max(lowest, low), min(highest, high)


def table(names, calls):
    """Return a line for each caller, callee and function: the calls, and where the median one's milliseconds go."""
    groups = collections.defaultdict(list)
    for call, run, answered in calls:
        whole = call["dur"]
        there = end_of(answered) - run["ts"]
        groups[f"{names[call['pid']]} -> {names[run['pid']]}: {call['name']}"].append((whole, whole - there, there))
    width = max(map(len, groups), default=26)
    lines = [f"{'RPCs, median milliseconds':<{width}}   calls   at caller  wire, queue   at callee"]
    for who, times in sorted(groups.items()):
        medians = ""
        for column in range(3):
            medians += f"{statistics.median(row[column] for row in times) / 1e6:>12.3f}"
        lines.append(f"{who:<{width}}{len(times):>8,}{medians}")
    return "\n".join(lines)


def lay_out(names, bars, mains):
    """Return the bars, each with a lane as its "tid", and the lanes' names.  `mains`: {rank: its main thread}.

    A bar is nested in its thread's, or takes the first lane that is free: which RPC thread serves a call means nothing.
    """
    open_bars = collections.defaultdict(list)  # (rank, group of lanes) -> for each lane, its open bars: (end, thread)
    labels = [_label("process_name", rank, 0, name) for rank, name in enumerate(names)]
    labelled = set()
    bars = sorted(bars, key=lambda bar: (bar["ts"], -bar["dur"]))
    for bar in bars:
        group = NO_THREAD.get(bar["cat"]) or LANES[0 if bar["tid"] == mains[bar["pid"]] else 2]
        thread = id(bar) if bar["cat"] in NO_THREAD else bar["tid"]
        lane = _free_lane(open_bars[bar["pid"], group], bar, thread)
        bar["tid"] = 100 * LANES.index(group) + lane
        if (bar["pid"], bar["tid"]) not in labelled:
            labelled.add((bar["pid"], bar["tid"]))
            labels.append(_label("thread_name", bar["pid"], bar["tid"], f"{group} {lane + 1}" if lane else group))
    return labels + bars


def _free_lane(lanes, bar, thread):
    """Put a bar into one of `lanes`: into that where its thread's bar is open, else into one that is free."""
    for lane in lanes:
        lane[:] = [(end, whose) for end, whose in lane if end > bar["ts"]]
    if all(lanes):
        lanes.append([])
    nested = [number for number, lane in enumerate(lanes) if lane and lane[-1][1] == thread]
    number = nested[0] if nested else lanes.index([])
    lanes[number].append((end_of(bar), thread))
    return number


def _label(kind, rank, lane, name):
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": name}}


def arrows(calls):
    """Return an arrow from bar to bar for each call, and one for its answer: two events each."""
    events = []
    for call, run, answered in calls:  # one nanosecond before its end a bar is still there
        ends = (call, call["ts"]), (run, run["ts"]), (answered, end_of(answered) - 1), (call, end_of(call) - 1)
        for number, (bar, time) in enumerate(ends, start=4 * call["args"]["call"]):
            arrow = {"ph": "sf"[number % 2], "bp": "e", "id": number // 2, "name": call["name"], "cat": "message"}
            events.append(arrow | {"pid": bar["pid"], "tid": bar["tid"], "ts": time})
    return events


# ------------------------------------------------------------------------------------------------- picture


def draw(file, kind, traces, steps=None, milliseconds=None):
    """Draw `traces`, {title: Chrome's events}, one below the other at one time scale.  `kind`: png or svg.

    `steps`: the first and the last to draw; without, one of median length, or what was before a failure.
    """
    from matplotlib.figure import Figure  # a second to import, so only when asked for
    from matplotlib.patches import Patch

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
        row = rows[bar["pid"], bar["tid"]]
        begin = (bar["ts"] - start) / 1e3
        length = bar["dur"] / 1e3
        state = STATES.get(bar["name"]) or STATES.get(bar["cat"], "waiting")
        edge = 0.4 if length > width / 200 else 0  # around a very short one it would be all that is seen
        axes.barh(row, length, 0.7, begin, color=COLORS[state], edgecolor="white", linewidth=edge)
        left, right = max(begin, 0), min(begin + length, width)
        written = 0.007 * width * (len(bar["name"]) + 1)  # about as wide as the name will be
        if right - left > written and left >= taken.get(row, 0):
            taken[row] = left + written
            axes.text(left, row, f" {bar['name']}", fontsize=6.5, va="center", clip_on=True, bbox=PAPER)
    draw_arrows(axes, events, rows, start, width)
    for event in events:
        if event["ph"] == "i":  # how the job ended
            axes.set_title(event["name"], loc="right", fontsize=8, color="firebrick")
            axes.axvline((event["ts"] - start) / 1e3, color="firebrick", linewidth=2)
    ticks = [f"{named[pid, 0, 'process_name']}, {named[pid, tid, 'thread_name']}" for pid, tid in rows]
    axes.set_yticks([*rows.values()], ticks)
    axes.set(xlim=(0, width), ylim=(-0.6, len(rows) - 0.4))
    axes.tick_params(labelsize=7)


def draw_arrows(axes, events, rows, start, width):
    """Draw the messages that leave in this window, between the lanes that have a row in it."""
    tails = {}  # number of the arrow -> where it begins
    for event in events:
        if event["ph"] not in "sf":
            continue
        place = (event["ts"] - start) / 1e3, rows.get((event["pid"], event["tid"]))
        if event["ph"] == "s":
            tails[event["id"]] = place
            continue
        tail = tails.pop(event["id"])
        if 0 <= tail[0] < width and None not in tail + place:
            axes.annotate("", place, tail, arrowprops=ARROW, annotation_clip=False)
