"""What `--trace FILE` leaves: all ranks' bars on one time line, for ui.perfetto.dev or as a picture, and a table.

Runs in the one process of a job that writes it: the starting process, or rank 0 of ranks started one by one.
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


def collect(args, store, worker_name, end=None, patience=0):
    """Write --trace from what the ranks hand in (waiting so many seconds for it), and print a table.

    `end`: the End of a job whose work is not done.
    """
    names, keys = zip(*((worker_name(rank, args), f"trace/{rank}") for rank in range(args.world_size)), strict=True)
    lost = ending.lost(store).keys() | ({end.rank} if end and end.kind == "lost" else set())
    with contextlib.suppress(RuntimeError):  # another is lost as well
        if patience:
            store.wait([key for rank, key in enumerate(keys) if rank not in lost], timedelta(seconds=patience))
    parts = {rank: json.loads(zlib.decompress(store.get(key))) for rank, key in enumerate(keys) if store.check([key])}
    bars = [bar for part in parts.values() for bar in part["bars"]]
    hosts = {rank: part["host"] for rank, part in parts.items()}
    calls = join(bars)
    clocks = line_up(calls, hosts)
    for bar in bars:
        bar["ts"] += clocks[hosts[bar["pid"]]][0]
    print(table(names, calls))
    for host, (shift, error) in clocks.items():
        if error:
            print(f"The clock of {host} was put right by {shift / 1e6:+.3f} ms, give or take {error / 1e6:.3f} ms.")
    for rank in [rank for rank, part in parts.items() if part["full"]]:
        print(f"--trace: {names[rank]} had more to record, these are the last {len(parts[rank]['bars']):,} bars.")
    events = lay_out(names, bars, {rank: part["main"] for rank, part in parts.items()}) + arrows(calls)
    if end:
        last = max(map(end_of, bars), default=0)
        events.append({"ph": "i", "s": "g", "name": f"rank {end.rank}: {end.why}", "pid": 0, "tid": 0, "ts": last})
    zero = min((bar["ts"] for bar in bars), default=0)
    for event in events:  # from nanoseconds to the format's microseconds
        event |= {key: (event[key] - then) / 1e3 for key, then in (("ts", zero), ("dur", 0)) if key in event}
    kind = os.path.splitext(args.trace)[1]
    if kind in (".png", ".svg"):
        from glue import picture  # matplotlib takes a second to import

        write_aside(args.trace, lambda file: picture.draw(file, kind[1:], {"": events}, args.trace_window))
    else:
        text = '{"traceEvents": [\n' + ",\n".join(map(json.dumps, events)) + "\n]}\n"
        write_aside(args.trace, lambda file: file.write(text.encode()))


def end_of(bar):
    return bar["ts"] + bar["dur"]


def join(bars):
    """Return (call, run, answered) of each call whose both sides are known: the caller's bar, and the callee's.

    With the end of `answered` the answer leaves: `run`, or the bar of a Future that was completed later.
    """
    found = {(bar["args"].get("call"), "to" in bar["args"] or bar["cat"]): bar for bar in bars}
    runs = [(bar, number) for (number, side), bar in found.items() if side == "run"]
    calls = [(found.get((number, True)), run, found.get((number, "held"), run)) for run, number in runs]
    return [(call, run, answered) for call, run, answered in calls if call]


def line_up(calls, hosts):
    """Return {host: (ns to add to its clock, by how much that may be wrong)}; the clock of the first host is right.

    A call is served after it was sent, and before its answer is there: both bound the difference of two clocks.
    """
    bounds = collections.defaultdict(lambda: (-(2**62), 2**62))
    for call, run, answered in calls:
        one, other = hosts[call["pid"]], hosts[run["pid"]]
        low, high = call["ts"] - run["ts"], end_of(call) - end_of(answered)  # to add to the other's: between these
        bounds[one, other] = max(bounds[one, other][0], low), min(bounds[one, other][1], high)
        bounds[other, one] = max(bounds[other, one][0], -high), min(bounds[other, one][1], -low)
    clocks = dict.fromkeys(list(hosts.values())[:1], (0, 0))
    for (one, other), (low, high) in [*bounds.items()] * len(hosts):  # from one host to the next
        if one in clocks and other not in clocks:
            clocks[other] = clocks[one][0] + (low + high) // 2, clocks[one][1] + abs(high - low) // 2
    return dict.fromkeys(hosts.values(), (0, 0)) | clocks


def table(names, calls):
    """Return a line for each caller, callee and function: the calls, and where the median one's milliseconds go."""
    groups = collections.defaultdict(list)
    for call, run, answered in calls:
        whole, there = call["dur"], end_of(answered) - run["ts"]
        groups[f"{names[call['pid']]} -> {names[run['pid']]}: {call['name']}"].append((whole, whole - there, there))
    width = max(map(len, groups), default=26)
    lines = [f"{'RPCs, median milliseconds':<{width}}   calls   at caller  wire, queue   at callee"]
    for who, times in sorted(groups.items()):
        medians = "".join(f"{statistics.median(column) / 1e6:>12.3f}" for column in zip(*times, strict=True))
        lines.append(f"{who:<{width}}{len(times):>8,}{medians}")
    return "\n".join(lines)


def lay_out(names, bars, mains):
    """Return the bars, each with a lane as its "tid", and the lanes' names.  `mains`: {rank: its main thread}.

    A bar is nested in its thread's, or takes the first lane that is free: which RPC thread serves a call means nothing.
    """
    lanes, named = collections.defaultdict(list), {("process_name", rank, 0): name for rank, name in enumerate(names)}
    bars = sorted(bars, key=lambda bar: (bar["ts"], -bar["dur"]))
    for bar in bars:
        group = NO_THREAD.get(bar["cat"]) or LANES[0 if bar["tid"] == mains[bar["pid"]] else 2]
        thread, stacks = id(bar) if bar["cat"] in NO_THREAD else bar["tid"], lanes[bar["pid"], group]
        for stack in stacks:  # the bars that are open in one lane
            stack[:] = [(end, whose) for end, whose in stack if end > bar["ts"]]
        if all(stacks):
            stacks.append([])
        nested = [n for n, stack in enumerate(stacks) if stack and stack[-1][1] == thread]
        lane = [*nested, stacks.index([])][0]
        stacks[lane].append((end_of(bar), thread))
        bar["tid"] = 100 * LANES.index(group) + lane
        named["thread_name", bar["pid"], bar["tid"]] = f"{group} {lane + 1}" if lane else group
    keys = ("name", "pid", "tid")
    return [
        {"ph": "M", "args": {"name": name}} | dict(zip(keys, key, strict=True)) for key, name in named.items()
    ] + bars


def arrows(calls):
    """Return an arrow from bar to bar for each call, and one for its answer: two events each."""
    events = []
    for call, run, answered in calls:  # one nanosecond before its end a bar is still there
        ends = (call, call["ts"]), (run, run["ts"]), (answered, end_of(answered) - 1), (call, end_of(call) - 1)
        for number, (bar, time) in enumerate(ends, start=4 * call["args"]["call"]):
            arrow = {"ph": "sf"[number % 2], "bp": "e", "id": number // 2, "name": call["name"], "cat": "message"}
            events.append(arrow | {"pid": bar["pid"], "tid": bar["tid"], "ts": time})
    return events
