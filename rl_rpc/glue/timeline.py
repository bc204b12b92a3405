"""What `--trace FILE` writes: the bars of all ranks on one time axis, for ui.perfetto.dev or as a picture, and a table.

Runs in one process of a job: the starting process, or rank 0 if the ranks were not spawned.  The picture has a lane for
each thread, dark while the thread works and pale while it waits, and arrows for the messages between the lanes.
"""

import collections
import json
import os
import statistics

from glue.checkpoint import write_aside

LANES = ("main thread", "calls in flight", "RPC thread", "answers owed")  # the groups of a rank's lanes, from above
NO_THREAD = {"async": LANES[1], "remote": LANES[1], "held": LANES[3]}  # kinds of bars during which no thread waits

BAR_COLORS = {"waiting": "#c6dbec", "working": "#1d5b8c", "backward": "#7aa6c8"}
STATES = {"backward": "backward", "run": "working", "step": "working", "work": "working"}  # by a bar's name or kind
MESSAGE_COLORS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#000000")  # one for each process except the busiest
ARROW = {"arrowstyle": "-|>", "linewidth": 0.9, "mutation_scale": 6, "shrinkA": 0, "shrinkB": 0}
PAPER = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6}  # the background of a name
MOST_CALLS = 60  # in one picture


def collect(path, window, parts, names, end=None):
    """Write the file of --trace to `path`, and print a table.

    `window`: the numbers of the first and the last step to draw, or None; `parts`: {rank: its recording}; `names`: the
    worker names of all ranks; `end`: the End, if the job's work is not done.  Raises UserError.
    """
    parts = dict(sorted(parts.items()))
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
            print(f"The clock of {host} was corrected by {shift / 1e6:+.3f} ms (error at most {error / 1e6:.3f} ms).")
    for rank, part in parts.items():
        if part["full"]:
            print(f"--trace: {names[rank]} recorded too many bars; the last {len(part['bars']):,} are kept.")
    events = lay_out(names, bars, {rank: part["main"] for rank, part in parts.items()}) + arrows(calls)
    if end:
        last = max(map(end_of, bars), default=0)
        events.append(
            {
                "ph": "i",
                "s": "g",
                "name": end.why if end.rank is None else f"rank {end.rank}: {end.why}",
                "pid": 0,
                "tid": 0,
                "ts": last,
            }
        )
    in_microseconds(events)
    kind = os.path.splitext(path)[1]
    if kind in (".png", ".svg") and not any("to" in bar["args"] for bar in bars_of(events)):
        print(f"--trace {path}: no RPC was recorded, so there is no picture.")
    elif kind in (".png", ".svg"):
        write_aside(path, lambda file: draw(file, kind[1:], {"": events}, window))
    else:
        text = '{"traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n"
        write_aside(path, lambda file: file.write(text.encode()))


def in_microseconds(events):
    """Convert the events' times from nanoseconds to the file format's microseconds, counted from the first bar."""
    zero = min((event["ts"] for event in events if event["ph"] == "X"), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - zero) / 1e3
        if "dur" in event:
            event["dur"] /= 1e3


def end_of(bar):
    return bar["ts"] + bar["dur"]


def join(bars):
    """Return (call, run, answered) for each call that was recorded at the caller and at the callee.

    `call` is the caller's bar, `run` the callee's.  The answer leaves at the end of `answered`: this is `run`, or the
    bar of a Future that was completed after `run`.
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
    """Return {host: (ns to add to its clock, the largest error of this correction)}.

    The clock of the first host is taken as correct.  A call is served after it was sent, and before its answer arrives.
    So each call gives a lower and an upper bound for the difference of two clocks.
    """
    bounds = {}  # (host, other host) -> (lowest, highest) number of ns to add to the other's clock
    for call, run, answered in calls:
        one, other = hosts[call["pid"]], hosts[run["pid"]]
        low = call["ts"] - run["ts"]
        high = end_of(call) - end_of(answered)
        _narrow(bounds, (one, other), low, high)
        _narrow(bounds, (other, one), -high, -low)
    clocks = dict.fromkeys(list(hosts.values())[:1], (0, 0))
    for _ in hosts:  # repeated, to reach hosts that have no calls with the first one
        for (one, other), (low, high) in bounds.items():
            if one in clocks and other not in clocks:
                shift, error = clocks[one]
                clocks[other] = shift + (low + high) // 2, error + abs(high - low) // 2
    return dict.fromkeys(hosts.values(), (0, 0)) | clocks


def _narrow(bounds, pair, low, high):
    lowest, highest = bounds.get(pair, (low, high))
    bounds[pair] = max(lowest, low), min(highest, high)


def table(names, calls):
    """Return a table with a line for each caller, callee and function.

    Columns: the number of calls, and medians in milliseconds: of the whole call at the caller, of its part on the wire
    and in queues, and of its part at the callee.
    """
    groups = collections.defaultdict(list)
    for call, run, answered in calls:
        whole = call["dur"]
        at_callee = end_of(answered) - run["ts"]
        group = f"{names[call['pid']]} -> {names[run['pid']]}: {call['name']}"
        groups[group].append((whole, whole - at_callee, at_callee))
    width = max(map(len, groups), default=26)
    lines = [f"{'RPCs, median milliseconds':<{width}}   calls   at caller  wire, queue   at callee"]
    for group, times in sorted(groups.items()):
        medians = ""
        for column in range(3):
            medians += f"{statistics.median(row[column] for row in times) / 1e6:>12.3f}"
        lines.append(f"{group:<{width}}{len(times):>8,}{medians}")
    return "\n".join(lines)


def lay_out(names, bars, mains):
    """Return the bars with a lane as their "tid", and events that name the lanes.  `mains`: {rank: its main thread}.

    A bar goes into the lane in which a bar of the same thread is open, or into the first free lane of its group.  So an
    RPC thread has no lane of its own, because it does not matter which thread serves a call.
    """
    open_bars = collections.defaultdict(list)  # (rank, group) -> for each lane a list of its open bars, (end, thread)
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
    """Put a bar into one of `lanes`, as lay_out says, and return the number of that lane."""
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
    """Return two arrows for each call, one for the call and one for its answer.  An arrow is a pair of events."""
    events = []
    for call, run, answered in calls:  # 1 ns before its end, an arrow's end is still inside the bar
        ends = (call, call["ts"]), (run, run["ts"]), (answered, end_of(answered) - 1), (call, end_of(call) - 1)
        for number, (bar, time) in enumerate(ends, start=4 * call["args"]["call"]):
            arrow = {"ph": "sf"[number % 2], "bp": "e", "id": number // 2, "name": call["name"], "cat": "message"}
            events.append(arrow | {"pid": bar["pid"], "tid": bar["tid"], "ts": time})
    return events


# ------------------------------------------------------------------------------------------------- picture


def draw(file, kind, traces, steps=None, milliseconds=None):
    """Draw `traces`, {title: events of Chrome's trace format}, below each other with the same time scale.

    `kind`: "png" or "svg"; `steps`: the numbers of the first and the last step to draw.  Without `steps`, a step of
    median length is drawn.  If the job has failed, or has no steps, the last calls are drawn.  `milliseconds`: the
    length of the period, if it is not that of the steps.
    """
    from matplotlib.figure import Figure  # a second to import, so only when asked for
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    windows = [choose_window(events, steps) for events in traces.values()]
    span = milliseconds * 1e3 if milliseconds else max(end - start for start, end in windows)  # in microseconds
    views = [View(events, start, span) for events, (start, _) in zip(traces.values(), windows, strict=True)]
    heights = [len(view.rows) for view in views]
    figure = Figure((10, 0.28 * sum(heights) + 0.4 * len(heights) + 0.7), layout="constrained")
    panels = figure.subplots(len(views), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    keys = {}  # the legend: {text: mark}
    for axes, title, view in zip(panels, traces, views, strict=True):
        view.draw(axes)
        axes.set_title(title, loc="left", fontsize=9)
        keys |= {state: Patch(color=BAR_COLORS[state]) for state in view.states()}
        for name, color in view.partners():
            keys[f"messages of {name}"] = Line2D([], [], color=color, linewidth=1.5)
    panels[-1].set_xlabel("milliseconds", fontsize=8)
    figure.legend(keys.values(), keys, loc="outside upper right", ncols=min(len(keys), 6), fontsize=8, frameon=False)
    figure.savefig(file, dpi=110, format=kind)


def bars_of(events, start=0.0, end=float("inf")):
    """Return the bars between two times, without torch's internal RPCs."""
    bars = [event for event in events if event["ph"] == "X" and not event["name"].startswith("torch.rpc.")]
    return [bar for bar in bars if bar["ts"] < end and end_of(bar) > start]


def choose_window(events, wanted):
    """Return (start, end) of the period to draw, with at most MOST_CALLS calls.  `wanted`: `steps` of draw()."""
    bars = bars_of(events)
    calls = [bar["ts"] for bar in bars if "to" in bar["args"]]
    steps = [bar for bar in bars if bar["cat"] == "step"]
    steps = [bar for bar in steps if bar["pid"] == steps[0]["pid"]]  # the steps of one rank
    chosen = sorted(steps, key=lambda bar: bar["dur"])[len(steps) // 2 :][:1]
    if wanted:
        chosen = [bar for bar in steps if wanted[0] <= int(bar["name"].split()[1]) <= wanted[1]] or chosen
    elif not steps or any(event["ph"] == "i" for event in events):
        return [*calls[-20:], 0][0], max(map(end_of, bars), default=1)
    start, end = chosen[0]["ts"], end_of(chosen[-1])
    return start, [*[time for time in calls if start <= time < end][MOST_CALLS:], end][0]


class View:
    """A period of one trace: its bars and messages, and a row for each lane.  Lanes that only wait are left out."""

    def __init__(self, events, start, span):
        """`start` and `span` of the period are in microseconds."""
        self.start = start
        self.width = span / 1e3  # in milliseconds, like everything that is drawn
        labels = [event for event in events if event["ph"] == "M"]
        self.names = {(label["name"], label["pid"], label["tid"]): label["args"]["name"] for label in labels}
        self.ends = [event for event in events if event["ph"] == "i"]  # how the job ended
        bars = bars_of(events, start, start + span)
        self.messages = messages_of(events, start, start + span)
        busy = {lane_of(bar) for bar in bars if state_of(bar) != "waiting"}
        for tail, head in self.messages:
            busy |= {lane_of(tail), lane_of(head)}
        self.bars = [bar for bar in bars if lane_of(bar) in busy]
        lanes = sorted({lane_of(bar) for bar in self.bars}, reverse=True)
        self.rows = {lane: row for row, lane in enumerate(lanes)}
        self.colors = colors_of_partners(events)

    def states(self):
        """Return the states of threads that occur in this view, in the order of the legend."""
        shown = {state_of(bar) for bar in self.bars}
        return [state for state in BAR_COLORS if state in shown]

    def partners(self):
        """Return (name, color) for each process whose messages have a color of their own and occur in this view."""
        if len(self.colors) < 2:
            return []
        shown = {self.partner(message) for message in self.messages}
        return [(self.names["process_name", rank, 0], self.colors[rank]) for rank in self.colors if rank in shown]

    def partner(self, message):
        """Return the rank whose color a message has: its sender or receiver, but not the busiest rank."""
        ranks = sorted({end["pid"] for end in message})
        return next((rank for rank in ranks if rank in self.colors), None)

    def milliseconds(self, event):
        return (event["ts"] - self.start) / 1e3

    def draw(self, axes):
        """Draw the bars, their names, and the messages between them."""
        for bar in self.bars:
            length = bar["dur"] / 1e3
            edge = 0.4 if length > self.width / 200 else 0  # an edge would hide a very short bar
            place = self.rows[lane_of(bar)], length, 0.7, self.milliseconds(bar)
            axes.barh(*place, color=BAR_COLORS[state_of(bar)], edgecolor="white", linewidth=edge)
        for message in self.messages:
            tail, head = ((self.milliseconds(end), self.rows.get(lane_of(end))) for end in message)
            if tail[1] is not None and head[1] is not None:
                arrow = ARROW | {"color": self.colors.get(self.partner(message), "black")}
                axes.annotate("", head, tail, arrowprops=arrow, annotation_clip=False)
        self.write_names(axes)
        for event in self.ends:
            axes.set_title(event["name"], loc="right", fontsize=8, color="firebrick")
            axes.axvline(self.milliseconds(event), color="firebrick", linewidth=2)
        labels = []
        for rank, lane in self.rows:
            labels.append(f"{self.names['process_name', rank, 0]}, {self.names['thread_name', rank, lane]}")
        axes.set_yticks([*self.rows.values()], labels)
        axes.set(xlim=(0, self.width), ylim=(-0.6, len(self.rows) - 0.4))
        axes.tick_params(labelsize=7)

    def write_names(self, axes):
        """Write its name into each bar that has room for it."""
        taken = {}  # row -> where the last name in it ends
        for bar in self.bars:
            row = self.rows[lane_of(bar)]
            left = max(self.milliseconds(bar), 0)
            right = min(self.milliseconds(bar) + bar["dur"] / 1e3, self.width)
            length = 0.007 * self.width * (len(bar["name"]) + 1)  # about the length of the name
            if right - left > length and left >= taken.get(row, 0):
                taken[row] = left + length
                axes.text(left, row, f" {bar['name']}", fontsize=6.5, va="center", clip_on=True, bbox=PAPER)


def lane_of(event):
    """Return (rank, number of the lane within the rank)."""
    return event["pid"], event["tid"]


def state_of(bar):
    """Return what the thread does during this bar: a key of BAR_COLORS."""
    return STATES.get(bar["name"]) or STATES.get(bar["cat"], "waiting")


def messages_of(events, start, end):
    """Return the messages that leave between two times, as (event at the sender, event at the receiver)."""
    tails = {}  # number of the arrow -> the event where it begins
    messages = []
    for event in events:
        if event["ph"] == "s":
            tails[event["id"]] = event
        elif event["ph"] == "f":
            tail = tails.pop(event["id"])
            if start <= tail["ts"] < end:
                messages.append((tail, event))
    return messages


def colors_of_partners(events):
    """Return {rank: color of its messages} for all ranks except the one with the most messages.

    With a server and two trainers, for example, the messages to and from each trainer have that trainer's color.
    """
    counts = collections.Counter(event["pid"] for event in events if event["ph"] in "sf")
    busiest = [rank for rank, _ in counts.most_common(1)]
    others = sorted(counts.keys() - set(busiest))
    return {rank: MESSAGE_COLORS[place % len(MESSAGE_COLORS)] for place, rank in enumerate(others)}
