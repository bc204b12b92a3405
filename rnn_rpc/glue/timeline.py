"""What `--trace FILE` writes: the bars of all ranks on one time axis, for ui.perfetto.dev or as a picture, and a table.

Runs in one process of a job: the starting process, or rank 0 if the ranks were not spawned. The picture has a lane for
each thread, dark while the thread works and pale while it waits, and arrows for the messages between the lanes.
"""

import collections
import json
import statistics

from glue.checkpoint import write_aside

LANES = ("main thread", "calls in flight", "RPC thread", "answers owed")  # the groups of a rank's lanes, from above
NO_THREAD = {"async": LANES[1], "remote": LANES[1], "held": LANES[3]}  # kinds of bars during which no thread waits

BAR_COLORS = {"waiting": "#c6dbec", "working": "#1d5b8c", "backward": "#7aa6c8"}
STATES = {"backward": "backward", "run": "working", "step": "working", "work": "working"}  # by a bar's name or kind
MESSAGE_COLORS = ("#000000", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # of calls and answers, by the caller's rank
ARROW = {"arrowstyle": "-|>", "linewidth": 0.9, "mutation_scale": 6, "shrinkA": 0, "shrinkB": 0}
PAPER = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6}  # the background of a name
MOST_CALLS = 60  # in one picture


def collect(path, parts, names, end=None):
    """Write the file of --trace to `path`, and print a table.

    `parts`: {rank: its recording}; `names`: the worker names of all ranks; `end`: the End, if the job's work is not
    done. Raises UserError.
    """
    parts = dict(sorted(parts.items()))
    bars = sorted((bar for part in parts.values() for bar in part["bars"]), key=lambda bar: (bar["ts"], -bar["dur"]))
    hosts = {rank: part["host"] for rank, part in parts.items()}
    calls = match(bars)
    clocks = line_up(calls, hosts)
    for bar in bars:
        bar["ts"] += clocks[hosts[bar["pid"]]][0]
    print(table(names, calls))
    for host, (shift, error) in clocks.items():
        if error:
            print(f"The clock of {host} was corrected by {shift / 1e6:+.3f} ms (error at most {error / 1e6:.3f} ms).")
    for rank, part in parts.items():
        if part["full"]:
            print(f"--trace: {names[rank]} recorded too many bars; the last {len(part['bars']):,} are kept.")
    events = lay_out(names, bars, {rank: part["main"] for rank, part in parts.items()}) + arrows(calls)
    if end:
        who = "" if end.rank is None else f"rank {end.rank}: "
        last = max(map(end_of, bars), default=0)
        events.append({"ph": "i", "s": "g", "name": f"{who}{end.why}", "pid": 0, "tid": 0, "ts": last})
    in_microseconds(events)
    if not path.endswith(".png"):
        text = '{"traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n"
        write_aside(path, lambda file: file.write(text.encode()))
    elif any("call" in bar["args"] for bar in shown_bars(events)):
        write_aside(path, lambda file: draw(file, events))
    else:
        print("--trace: no RPC was recorded, so there is no picture")


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


def match(bars):
    """Return (call, run, answered) for each call that was recorded at the caller and at the callee.

    `call` is the caller's bar, `run` the callee's. The answer leaves at the end of `answered`: this is `run`, or the
    bar of a Future that was completed after `run`.
    """
    made, served, held = {}, {}, {}  # number of the call -> bar
    for bar in bars:
        found = made if "to" in bar["args"] else {"run": served, "held": held}.get(bar["cat"])
        if found is not None:
            found[bar["args"].get("call")] = bar
    return [(made[number], run, held.get(number, run)) for number, run in served.items() if number in made]


def line_up(calls, hosts):
    """Return {host: (ns to add to its clock, the largest error of this correction)}.

    The clock of the first host is taken as correct. A call is served after it was sent, and before its answer arrives.
    So each call gives a lower and an upper bound for the difference of two clocks.
    """
    bounds = {}  # (host, other host) -> (lowest, highest) number of ns to add to the other's clock
    for call, run, answered in calls:
        one, other = hosts[call["pid"]], hosts[run["pid"]]
        low, high = call["ts"] - run["ts"], end_of(call) - end_of(answered)
        for pair, least, most in (((one, other), low, high), ((other, one), -high, -low)):
            lowest, highest = bounds.get(pair, (least, most))
            bounds[pair] = max(lowest, least), min(highest, most)
    clocks = dict.fromkeys(list(hosts.values())[:1], (0, 0))
    for _ in hosts:  # repeated, to reach hosts that have no calls with the first one
        for (one, other), (low, high) in bounds.items():
            if one in clocks and other not in clocks:
                shift, error = clocks[one]
                clocks[other] = shift + (low + high) // 2, error + abs(high - low) // 2
    return dict.fromkeys(hosts.values(), (0, 0)) | clocks


def table(names, calls):
    """Return a table with a line for each caller, callee and function.

    Columns: the number of calls, and medians in milliseconds: of the whole call at the caller, of its part on the wire
    and in queues, and of its part at the callee.
    """
    groups = collections.defaultdict(list)
    for call, run, answered in calls:
        at_callee = end_of(answered) - run["ts"]
        group = f"{names[call['pid']]} -> {names[run['pid']]}: {call['name']}"
        groups[group].append((call["dur"], call["dur"] - at_callee, at_callee))
    width = max(map(len, groups), default=26)
    lines = [f"{'RPCs, median milliseconds':<{width}}   calls   at caller  wire, queue   at callee"]
    for group, times in sorted(groups.items()):
        medians = "".join(f"{statistics.median(column) / 1e6:>12.3f}" for column in zip(*times, strict=True))
        lines.append(f"{group:<{width}}{len(times):>8,}{medians}")
    return "\n".join(lines)


def lay_out(names, bars, mains):
    """Return the bars with a lane as their "tid", and events that name the lanes. `mains`: {rank: its main thread}.

    A bar goes into the lane in which a bar of the same thread is open, or into the first free lane of its group. So an
    RPC thread has no lane of its own, because it does not matter which thread serves a call.
    """
    open_bars = collections.defaultdict(list)  # (rank, group) -> for each lane a list of its open bars, (end, thread)
    labels = {(rank, None): _label("process_name", rank, 0, name) for rank, name in enumerate(names)}
    for bar in bars:
        group = NO_THREAD.get(bar["cat"]) or LANES[0 if bar["tid"] == mains[bar["pid"]] else 2]
        thread = id(bar) if bar["cat"] in NO_THREAD else bar["tid"]
        lane = _free_lane(open_bars[bar["pid"], group], bar, thread)
        bar["tid"] = 100 * LANES.index(group) + lane
        text = f"{group} {lane + 1}" if lane else group
        labels.setdefault((bar["pid"], bar["tid"]), _label("thread_name", bar["pid"], bar["tid"], text))
    return [*labels.values(), *bars]


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
    """Return two arrows for each call: one for the call, and one with an odd id for its answer.

    An arrow is a pair of events.
    """
    events = []
    for call, run, answered in calls:  # 1 ns before its end, an arrow's end is still inside the bar
        ends = (call, call["ts"]), (run, run["ts"]), (answered, end_of(answered) - 1), (call, end_of(call) - 1)
        for number, (bar, time) in enumerate(ends, start=4 * call["args"]["call"]):
            arrow = {"ph": "sf"[number % 2], "bp": "e", "id": number // 2, "name": call["name"], "cat": "message"}
            events.append(arrow | {"pid": bar["pid"], "tid": bar["tid"], "ts": time})
    return events


# ------------------------------------------------------------------------------------------------- picture


def draw(file, events):
    """Draw a step of median length as a PNG. If the job has failed, or has no steps, the last calls are drawn."""
    from matplotlib.figure import Figure  # a second to import, so only when asked for

    start, end = choose_window(events)
    view = View(events, start, end - start)
    figure = Figure((10, 0.28 * len(view.rows) + 1.1), layout="constrained")
    axes = figure.subplots()
    view.draw(axes)
    axes.set_xlabel("milliseconds", fontsize=8)
    keys = view.legend()
    figure.legend(keys.values(), keys, loc="outside upper right", ncols=min(len(keys), 6), fontsize=8, frameon=False)
    figure.savefig(file, dpi=110, format="png")


def shown_bars(events):
    """Return the bars, without torch's internal RPCs."""
    return [event for event in events if event["ph"] == "X" and not event["name"].startswith("torch.rpc.")]


def steps_of(bars):
    """Return the steps of the first rank that has any."""
    steps = [bar for bar in bars if bar["cat"] == "step"]
    return [bar for bar in steps if bar["pid"] == steps[0]["pid"]]


def choose_window(events):
    """Return (start, end) of the period to draw, with at most MOST_CALLS calls."""
    bars = shown_bars(events)
    calls = [bar["ts"] for bar in bars if "to" in bar["args"]]
    steps = sorted(steps_of(bars), key=lambda bar: bar["dur"])
    if not steps or any(event["ph"] == "i" for event in events):
        return min(calls[-20:], default=0), max(map(end_of, bars))
    step = steps[len(steps) // 2]
    too_many = [time for time in calls if step["ts"] <= time < end_of(step)][MOST_CALLS:]
    return step["ts"], min(too_many, default=end_of(step))


class View:
    """A period of a trace: its bars and messages, and a row for each lane. Lanes that only wait are left out."""

    def __init__(self, events, start, span):
        """`start` and `span` of the period are in microseconds."""
        self.start, self.width = start, span / 1e3  # everything that is drawn is in milliseconds
        names = {(each["name"], each["pid"], each["tid"]): each["args"]["name"] for each in events if each["ph"] == "M"}
        tails = {event["id"]: event for event in events if event["ph"] == "s"}
        arrows = [(tails[event["id"]], event) for event in events if event["ph"] == "f"]
        # The messages that leave in this period, as (event at the sender, event at the receiver).
        self.messages = [(tail, head) for tail, head in arrows if start <= tail["ts"] < start + span]
        self.job_ends = [event for event in events if event["ph"] == "i"]
        bars = [bar for bar in shown_bars(events) if bar["ts"] < start + span and end_of(bar) > start]
        busy = {lane_of(bar) for bar in bars if state_of(bar) != "waiting"}
        busy |= {lane_of(end) for message in self.messages for end in message}
        self.bars = [bar for bar in bars if lane_of(bar) in busy] or bars
        lanes = sorted({lane_of(bar) for bar in self.bars}, reverse=True)
        self.rows = {lane: row for row, lane in enumerate(lanes)}
        self.labels = [f"{names['process_name', rank, 0]}, {names['thread_name', rank, lane]}" for rank, lane in lanes]

    def legend(self):
        """Return {text: mark} for the colors that occur."""
        from matplotlib.patches import Patch

        states = {state_of(bar) for bar in self.bars}
        return {state: Patch(color=color) for state, color in BAR_COLORS.items() if state in states}

    def _milliseconds(self, event):
        return (event["ts"] - self.start) / 1e3

    def draw(self, axes):
        """Draw the bars, their names, and the messages between them."""
        for bar in self.bars:
            length = bar["dur"] / 1e3
            edge = 0.4 if length > self.width / 200 else 0  # an edge would hide a very short bar
            place = self.rows[lane_of(bar)], length, 0.7, self._milliseconds(bar)
            axes.barh(*place, color=BAR_COLORS[state_of(bar)], edgecolor="white", linewidth=edge)
        for message in self.messages:
            is_answer = message[0]["id"] % 2
            arrow = ARROW | {"color": MESSAGE_COLORS[message[is_answer]["pid"] % len(MESSAGE_COLORS)]}
            if all(lane_of(end) in self.rows for end in message):
                tail, head = ((self._milliseconds(end), self.rows[lane_of(end)]) for end in message)
                axes.annotate("", head, tail, arrowprops=arrow, annotation_clip=False)
        self._write_names(axes)
        for event in self.job_ends:
            axes.set_title(event["name"], loc="right", fontsize=8, color="firebrick")
            axes.axvline(self._milliseconds(event), color="firebrick", linewidth=2)
        axes.set_yticks([*self.rows.values()], self.labels)
        axes.set(xlim=(0, self.width), ylim=(-0.6, len(self.rows) - 0.4))
        axes.tick_params(labelsize=7)

    def _write_names(self, axes):
        """Write its name into each bar that has room for it."""
        taken = {}  # row -> where the last name in it ends
        for bar in self.bars:
            row = self.rows[lane_of(bar)]
            left = max(self._milliseconds(bar), 0)
            right = min(self._milliseconds(bar) + bar["dur"] / 1e3, self.width)
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
