"""Draws a recording: a .json with everything for ui.perfetto.dev, or a .png of one step.

The picture has a lane for each thread, dark while the thread works and pale while it waits, and arrows for the
messages between the lanes. The .json has the same lanes and arrows.
"""

import collections
import json

from rpctrace.read import OF_TORCH, end_of, is_answered

# The groups of a process's lanes, from above.
LANES = ("main thread", "calls in flight", "RPC thread", "answers owed", "backward pass")
# Kinds of bars during which no thread waits, or of which the thread is not known.
NO_THREAD = {"async": LANES[1], "remote": LANES[1], "held": LANES[3], "part": LANES[4]}
COLORS = {"waiting": "#c6dbec", "working": "#1d5b8c", "backward": "#7aa6c8"}  # of bars
STATES = dict.fromkeys(("run", "step", "work"), "working") | dict.fromkeys(("backward", "part"), "backward")
MESSAGE_COLORS = ("#000000", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # of calls and answers, by the caller
MOST_CALLS = 60  # in one picture
SIZE, LETTER = 6.5, 0.07  # of the letters in bars: points; and inches that one is wide, with the space around the axes


def write(path, events):
    if path.endswith(".json"):
        with open(path, "w") as file:
            file.write('{"traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n")
    else:
        draw(path, events)


def lay_out(processes, bars):
    """Return the bars with a lane as their "tid", and events that name the lanes.

    A thread keeps its lane until its outermost bar ends; then the lane is free. So an RPC thread has no lane of its
    own, because it does not matter which thread serves a call.
    """
    lanes = collections.defaultdict(Lanes)  # of each (process, group)
    labels = {(n, None): label("process_name", n, 0, process["name"]) for n, process in enumerate(processes)}
    for bar in bars:
        number = bar["pid"]
        group = NO_THREAD.get(bar["cat"]) or LANES[0 if bar["tid"] == processes[number]["main"] else 2]
        lane = lanes[number, group].of(id(bar) if bar["cat"] in NO_THREAD else bar["tid"], bar)
        bar["tid"] = 1_000_000 * LANES.index(group) + lane
        text = f"{group} {lane + 1}" if lane else group
        labels.setdefault((number, bar["tid"]), label("thread_name", number, bar["tid"], text))
    return [*labels.values(), *bars]


class Lanes:
    """The lanes of one group. Bars come in the order of their starts."""

    def __init__(self):
        self.until = []  # when each lane is free
        self.threads = {}  # thread -> (its lane, until when it has it)

    def of(self, thread, bar):
        """Return the number of the lane that this thread has, or else of the first that is free."""
        lane, until = self.threads.get(thread, (0, 0))
        if until <= bar["ts"]:
            lane = next((n for n, end in enumerate(self.until) if end <= bar["ts"]), len(self.until))
            self.until[lane : lane + 1] = [end_of(bar)]  # or it is a further lane
            self.threads[thread] = lane, end_of(bar)
        return lane


def label(kind, process, lane, name):
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def arrows(calls):
    """Return the two ends of an arrow for each call, and of one for its answer, whose number is odd.

    The "tid" of the bars is already a lane, see lay_out().
    """
    events = []
    for number, (call, run, answered) in enumerate(calls):
        ends = [(call, call["ts"], "s", 0), (run, run["ts"], "f", 0)]
        if is_answered(call, answered):  # 1 ns before its end, an arrow's end is still inside the bar
            ends += [(answered, end_of(answered) - 1e-3, "s", 1), (call, end_of(call) - 1e-3, "f", 1)]
        for bar, moment, phase, answer in ends:
            event = {"ph": phase, "pid": bar["pid"], "tid": bar["tid"], "ts": moment, "id": 2 * number + answer}
            events.append(event | {"name": call["name"], "cat": "message", "bp": "e"})
    return events


def draw(path, events):
    from matplotlib.figure import Figure  # a second to import, so only when asked for

    calls = [event for event in events if "to" in event.get("args", ()) and not event["name"].startswith(OF_TORCH)]
    start, end = typical_period(events, calls)
    figure = Figure((10, 1), layout="constrained")
    axes = figure.subplots()
    draw_period(axes, events, start, end)
    axes.set_xlabel("milliseconds", fontsize=8)
    figure.set_figheight(0.28 * len(axes.get_yticks()) + 1.1)
    figure.legend(handles=legend(), loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110, format="png")


def typical_period(events, calls):
    """Return (start, end) of what is drawn: of all steps, the one of median length. At most MOST_CALLS calls."""
    steps = sorted((event for event in events if event.get("cat") == "step"), key=lambda bar: bar["dur"])
    if not steps:  # some calls from the middle
        first = max(0, (len(calls) - MOST_CALLS) // 2)
        drawn, later = calls[first : first + MOST_CALLS], calls[first + MOST_CALLS :]
        end = max(end_of(call) for call in drawn)  # of one that takes long, or never ends, only the beginning is drawn
        return calls[first]["ts"], min(end, later[0]["ts"]) if later else end
    start, end = steps[len(steps) // 2]["ts"], end_of(steps[len(steps) // 2])
    within = [call["ts"] for call in calls if start <= call["ts"] < end]
    return start, min(within[MOST_CALLS:], default=end)


def draw_period(axes, events, start, end):
    """Draw the bars from `start` to `end`, in microseconds, and the messages that leave then.

    Lanes that only wait are left out, and so are torch's internal RPCs.
    """
    events = [event for event in events if not event["name"].startswith(OF_TORCH)]
    bars = [bar for bar in events if bar["ph"] == "X" and bar["ts"] < end and end_of(bar) > start]
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    messages = [(tail, heads[tail["id"]]) for tail in events if tail["ph"] == "s" and start <= tail["ts"] < end]
    busy = {lane_of(bar) for bar in bars if state_of(bar) != "waiting"}
    lanes = sorted(busy.union(lane_of(event) for message in messages for event in message), reverse=True)
    rows = {lane: row for row, lane in enumerate(lanes)}
    draw_bars(axes, [bar for bar in bars if lane_of(bar) in rows], rows, start, end)
    for tail, head in messages:
        caller = (head if tail["id"] % 2 else tail)["pid"]
        arrow = {"arrowstyle": "-|>", "linewidth": 0.9, "mutation_scale": 6, "shrinkA": 0, "shrinkB": 0}
        arrow["color"] = MESSAGE_COLORS[caller % len(MESSAGE_COLORS)]
        tip, origin = (((event["ts"] - start) / 1e3, rows[lane_of(event)]) for event in (head, tail))
        drawn = axes.annotate("", tip, origin, arrowprops=arrow, annotation_clip=False)
        drawn.arrow_patch.set_clip_box(axes.bbox)
    names = {(event["name"], *lane_of(event)): event["args"]["name"] for event in events if event["ph"] == "M"}
    labels = [f"{names['process_name', rank, 0]}, {names['thread_name', rank, lane]}" for rank, lane in lanes]
    axes.set_yticks(range(len(lanes)), labels)
    axes.set(xlim=(0, (end - start) / 1e3), ylim=(-0.6, len(lanes) - 0.4))
    axes.tick_params(labelsize=7)


def draw_bars(axes, bars, rows, start, end):
    """Draw the bars, with a name in each that has room for it: white letters on dark bars, black ones on pale bars."""
    from matplotlib.patheffects import withStroke

    letter = LETTER * (end - start) / 1e3 / axes.figure.get_figwidth()  # its width, in milliseconds
    for bar in bars:
        left, length = (bar["ts"] - start) / 1e3, bar["dur"] / 1e3
        color = COLORS[state_of(bar)]
        axes.barh(rows[lane_of(bar)], length, 0.7, left, color=color, edgecolor="white", linewidth=0.2)
    taken = collections.defaultdict(list)  # row -> (left, right) of each name in it
    for bar in sorted(bars, key=lambda bar: bar["ts"] < start):  # a bar that began before `start` gives way to others
        row, left, right = rows[lane_of(bar)], max(bar["ts"] - start, 0) / 1e3, (min(end_of(bar), end) - start) / 1e3
        end_of_name = left + letter * (len(bar["name"]) + 1)
        if end_of_name < right and all(end_of_name <= begin or over <= left for begin, over in taken[row]):
            taken[row].append((left, end_of_name))
            color = COLORS[state_of(bar)]
            name = axes.text(left, row, f" {bar['name']}", fontsize=SIZE, va="center", clip_on=True)
            name.set_color("white" if color == COLORS["working"] else "black")
            name.set_path_effects([withStroke(linewidth=1.5, foreground=color)])  # it may reach over other bars


def legend():
    """Return the handles of a legend of the states."""
    from matplotlib.patches import Patch

    return [Patch(color=color, label=state) for state, color in COLORS.items()]


def lane_of(event):
    """Return (rank, number of the lane within the rank)."""
    return event["pid"], event["tid"]


def state_of(bar):
    """Return what the thread does during this bar: a key of COLORS."""
    return STATES.get(bar["cat"], "waiting")
