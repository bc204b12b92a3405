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

COLORS = {"waiting": "#c6dbec", "working": "#1d5b8c", "backward": "#7aa6c8"}  # of bars
STATES = {"backward": "backward", "run": "working", "step": "working", "work": "working"}  # by a bar's name or kind
MESSAGE_COLORS = ("#000000", "#d55e00", "#009e73", "#cc79a7", "#e69f00")  # of calls and answers, by the caller's rank
MOST_CALLS = 60  # in one picture
OF_TORCH = "torch.rpc."  # so begin the names of the RPCs that torch makes by itself


def collect(path, parts, names):
    """Write the file of --trace to `path`, and print a table. Raises UserError.

    `parts`: {rank: its recording}; `names`: the worker names of all ranks.
    """
    bars = sorted((bar for part in parts.values() for bar in part["bars"]), key=lambda bar: (bar["ts"], -bar["dur"]))
    calls = match(bars)
    hosts = {rank: parts[rank]["host"] for rank in sorted(parts)}
    clocks = line_up(calls, hosts)
    for bar in bars:
        bar["ts"] += clocks[hosts[bar["pid"]]][0]
    zero = min((bar["ts"] for bar in bars), default=0)
    for bar in bars:  # nanoseconds since 1970 -> microseconds since the first bar, as the file format demands
        bar |= {"ts": (bar["ts"] - zero) / 1e3, "dur": bar["dur"] / 1e3}
    print(table(names, calls))
    for host, (shift, error) in clocks.items():
        if error:
            print(f"The clock of {host} was corrected by {shift / 1e6:+.3f} ms (error at most {error / 1e6:.3f} ms).")
    for rank, part in parts.items():
        if part["full"]:
            print(f"--trace: {names[rank]} recorded too many bars; the last {len(part['bars']):,} are kept.")
    events = lay_out(names, bars, {rank: part["main"] for rank, part in parts.items()}) + arrows(calls)
    if not path.endswith(".png"):
        text = '{"traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n"
        write_aside(path, lambda file: file.write(text.encode()))
    elif not all(call["name"].startswith(OF_TORCH) for call, _, _ in calls):
        write_aside(path, lambda file: draw(file, events))
    else:
        print("--trace: no RPC was recorded, so there is no picture")


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
    """Return {host: (nanoseconds to add to its clock, the largest error of this correction)}. `hosts`: {rank: host}.

    The clock of the first host is taken as correct. A call is served after it was sent, and before its answer arrives.
    So each call gives a lower and an upper bound for the difference of two clocks.
    """
    bounds = {}  # (host, other host) -> (lowest, highest) number to add to the other's clock
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
        medians = "".join(f"{statistics.median(column) / 1e3:>12.3f}" for column in zip(*times, strict=True))
        lines.append(f"{group:<{width}}{len(times):>8,}{medians}")
    return "\n".join(lines)


def lay_out(names, bars, mains):
    """Return the bars with a lane as their "tid", and events that name the lanes. `mains`: {rank: its main thread}.

    A thread keeps its lane until its outermost bar ends; then the lane is free. So an RPC thread has no lane of its
    own, because it does not matter which thread serves a call.
    """
    lanes = collections.defaultdict(list)  # (rank, group) -> for each lane: (its thread, when that lane is free again)
    labels = {(rank, None): _label("process_name", rank, 0, name) for rank, name in enumerate(names)}
    for bar in bars:
        rank, start = bar["pid"], bar["ts"]
        group = NO_THREAD.get(bar["cat"]) or LANES[0 if bar["tid"] == mains[rank] else 2]
        thread = id(bar) if bar["cat"] in NO_THREAD else bar["tid"]
        ours = lanes[rank, group]
        nested = [number for number, (owner, until) in enumerate(ours) if owner == thread and until > start]
        free = [number for number, (_, until) in enumerate(ours) if until <= start]
        lane = (nested or free or [len(ours)])[0]
        if not nested:
            ours[lane : lane + 1] = [(thread, end_of(bar))]
        bar["tid"] = 100 * LANES.index(group) + lane
        text = f"{group} {lane + 1}" if lane else group
        labels.setdefault((rank, bar["tid"]), _label("thread_name", rank, bar["tid"], text))
    return [*labels.values(), *bars]


def _label(kind, rank, lane, name):
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": name}}


def arrows(calls):
    """Return two arrows for each call: one for the call, and one with an odd id for its answer.

    An arrow is a pair of events.
    """
    events = []
    for call, run, answered in calls:  # 1 ns before its end, an arrow's end is still inside the bar
        ends = (call, call["ts"]), (run, run["ts"]), (answered, end_of(answered) - 1e-3), (call, end_of(call) - 1e-3)
        for number, (bar, time) in enumerate(ends, start=4 * call["args"]["call"]):
            arrow = {"ph": "sf"[number % 2], "bp": "e", "id": number // 2, "name": call["name"], "cat": "message"}
            events.append(arrow | {"pid": bar["pid"], "tid": bar["tid"], "ts": time})
    return events


# ------------------------------------------------------------------------------------------------- picture


def draw(file, events):
    """Draw the step in the middle of the run as a PNG; if there are no steps, everything. At most MOST_CALLS calls."""
    from matplotlib.figure import Figure  # a second to import, so only when asked for

    bars = [event for event in events if event["ph"] == "X"]
    steps = [(bar["ts"], end_of(bar)) for bar in bars if bar["cat"] == "step"]
    start, end = steps[len(steps) // 2] if steps else (0, max(map(end_of, bars)))
    calls = [bar["ts"] for bar in bars if "to" in bar["args"] and start <= bar["ts"] < end]
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    draw_period(axes, events, start, min(calls[MOST_CALLS:], default=end))
    axes.set_xlabel("milliseconds", fontsize=8)
    figure.set_size_inches(10, 0.28 * len(axes.get_yticks()) + 1.1)
    figure.legend(handles=legend(), loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(file, dpi=110, format="png")


def draw_period(axes, events, start, end):
    """Draw the bars from `start` to `end`, in microseconds, and the messages that leave then.

    Lanes that only wait are left out, and so are torch's internal RPCs.
    """
    bars = [bar for bar in events if bar["ph"] == "X" and bar["ts"] < end and end_of(bar) > start]
    bars = [bar for bar in bars if not bar["name"].startswith(OF_TORCH)]
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    messages = [(tail, heads[tail["id"]]) for tail in events if tail["ph"] == "s" and start <= tail["ts"] < end]
    busy = {lane_of(bar) for bar in bars if state_of(bar) != "waiting"}
    lanes = sorted(busy.union(lane_of(event) for message in messages for event in message), reverse=True)
    rows = {lane: row for row, lane in enumerate(lanes)}
    _draw_bars(axes, [bar for bar in bars if lane_of(bar) in rows], rows, start, end)
    for tail, head in messages:
        caller = (head if tail["id"] % 2 else tail)["pid"]
        arrow = {"arrowstyle": "-|>", "linewidth": 0.9, "mutation_scale": 6, "shrinkA": 0, "shrinkB": 0}
        arrow["color"] = MESSAGE_COLORS[caller % len(MESSAGE_COLORS)]
        tip, origin = (((event["ts"] - start) / 1e3, rows[lane_of(event)]) for event in (head, tail))
        axes.annotate("", tip, origin, arrowprops=arrow, annotation_clip=False)
    names = {(event["name"], *lane_of(event)): event["args"]["name"] for event in events if event["ph"] == "M"}
    labels = [f"{names['process_name', rank, 0]}, {names['thread_name', rank, lane]}" for rank, lane in lanes]
    axes.set_yticks(range(len(lanes)), labels)
    axes.set(xlim=(0, (end - start) / 1e3), ylim=(-0.6, len(lanes) - 0.4))
    axes.tick_params(labelsize=7)


def _draw_bars(axes, bars, rows, start, end):
    """Draw the bars, with a name in each that has room for it."""
    paper = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6}
    taken = {}  # row -> where the last name in it ends
    for bar in bars:
        row, left, right = rows[lane_of(bar)], (bar["ts"] - start) / 1e3, (end_of(bar) - start) / 1e3
        axes.barh(row, right - left, 0.7, left, color=COLORS[state_of(bar)], edgecolor="white", linewidth=0.2)
        left, right = max(left, 0), min(right, (end - start) / 1e3)
        length = 7e-6 * (end - start) * (len(bar["name"]) + 1)  # about the length of the name
        if right - left > length and left >= taken.get(row, 0):
            taken[row] = left + length
            axes.text(left, row, f" {bar['name']}", fontsize=6.5, va="center", clip_on=True, bbox=paper)


def legend():
    from matplotlib.patches import Patch

    return [Patch(color=color, label=state) for state, color in COLORS.items()]


def lane_of(event):
    """Return (rank, number of the lane within the rank)."""
    return event["pid"], event["tid"]


def state_of(bar):
    """Return what the thread does during this bar: a key of COLORS."""
    return STATES.get(bar["name"]) or STATES.get(bar["cat"], "waiting")
