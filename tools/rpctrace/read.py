"""Reads what was recorded: the bars of all processes on one time axis, and the table of the calls."""

import collections
import contextlib
import json
import mmap
import pathlib
import statistics
import sys

OF_TORCH = "torch.rpc."  # so begin the names of the RPCs that torch makes by itself
UNFINISHED = " (unfinished)"  # so end the names of bars that had no end when their process ended
MOST_LINES = 2_000_000  # that are read, of all processes together. A bar has two, and takes about 2 kB of memory


def say(line):
    print(f"rpctrace: {line}", file=sys.stderr)


def recordings(folder):
    """Return the paths of the files that were recorded into this folder."""
    return sorted(pathlib.Path(folder).rglob(f"*-{'[0-9a-f]' * 16}.jsonl"))


def is_recorded(recorded):
    """Return whether these processes could be recorded, and say so if not."""
    missing = sorted({process["cannot"] for process in recorded if "cannot" in process})
    for why in missing:
        say(f"not recorded: {why}")
    if not recorded:
        say(
            "nothing was recorded: no process of the command has imported torch, or Python was told to ignore its "
            "environment (-I, -E, -S), or the command replaces PYTHONPATH instead of adding to it"
        )
    return bool(recorded and not missing)


def read(folder, most=MOST_LINES):
    """Return the recorded processes. The "bars" of each are {number: event of Chrome's trace format, but in ns}.

    record/sitecustomize.py lists the lines, and the kinds of bars.
    `most`: how many lines about bars are read, the same number of each process. Those about processes are all read.
    """
    paths = recordings(folder)
    return [read_process(path, most // len(paths)) for path in paths]


def read_process(path, most):
    bars, process = {}, {"full": False}
    with path.open("rb") as file:
        for number, text in enumerate(file):
            if number >= most and text.startswith((b'{"begin": ', b'{"end": ')):
                process["full"] |= most > 0
                continue
            with contextlib.suppress(ValueError):  # it is not complete, or it is what follows the last one
                line = json.loads(text.strip(b"\0"))
                if "begin" in line:
                    bars[line["begin"]] = {"ph": "X", **line}
                elif "end" not in line:
                    process |= line  # about the process itself
                elif line["end"] in bars:
                    bars[line["end"]]["dur"] = line["ts"] - bars[line["end"]]["ts"]
    return process | {"bars": bars}


def positions(folder):
    """Return where each file of a folder ends: if that stays the same, no call begins or ends."""
    found = []
    for path in (path for path in recordings(folder) if path.stat().st_size):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found.append((path, content.rfind(b"\n")))
    return found


def arrange(processes):
    """Return the processes that have bars, in the order of their ranks. Give each its "name", and each bar its end."""
    processes = [process for process in processes if process["bars"]]
    processes.sort(key=lambda process: (process.get("rank", len(processes)), process["pid"]))
    workers = [process.get("worker") for process in processes]
    times = [end_of(bar) for process in processes for bar in process["bars"].values()] or [0]
    end = max(times) + (max(times) - min(times)) // 20  # of all unfinished bars: so nested ones are nested in the file
    for number, (process, worker) in enumerate(zip(processes, workers, strict=True)):
        alone = worker and workers.count(worker) == 1  # otherwise init_rpc has not returned, or it was started again
        process["name"] = worker if alone else f"{worker or ''} process {process['pid']}".strip()
        for bar in process["bars"].values():
            bar["pid"] = number
            if "dur" not in bar:
                bar |= {"dur": end - bar["ts"], "name": bar["name"] + UNFINISHED}
    return processes


def backward_elsewhere(processes, bars):
    """Return a bar for each process that takes part in another one's backward pass, of which nothing is recorded."""
    ranks = {process.get("rank"): number for number, process in enumerate(processes) if process.get("worker")}
    return [
        {**bar, "pid": ranks[rank], "cat": "part", "args": {"of": processes[bar["pid"]]["name"]}}
        for bar in bars
        for rank in bar["args"].get("workers", ())
        if rank in ranks and ranks[rank] != bar["pid"]
    ]


def end_of(bar):
    return bar["ts"] + bar.get("dur", 0)


def match(bars):
    """Return (call, run, answered) for each call that was recorded at the caller and at the callee.

    `call` is the caller's bar, `run` the callee's. The answer leaves at the end of `answered`: this is `run`, or the
    bar of a Future that was completed after `run`.
    """
    made, served, held = {}, {}, {}  # number of the call -> bar
    for bar in bars:
        found = made if "to" in bar["args"] else {"run": served, "held": held}.get(bar["cat"])
        if found is not None:
            found[bar["args"]["call"]] = bar
    return [(made[number], run, held.get(number, run)) for number, run in served.items() if number in made]


def is_answered(call, answered):
    """Return whether the caller got the answer, before it gave up. Times are on one time axis."""
    finished = not any(bar["name"].endswith(UNFINISHED) for bar in (call, answered))
    return finished and end_of(answered) <= end_of(call)


def count_from_zero(bars):
    """Turn nanoseconds since 1970 into microseconds since the first bar, as the file format demands."""
    zero = min(bar["ts"] for bar in bars)
    for bar in bars:
        bar |= {"ts": (bar["ts"] - zero) / 1e3, "dur": bar["dur"] / 1e3}


def table(processes, made, calls):
    """Return a table with a line for each caller, callee and function. `made`: the callers' bars.

    Columns: the number of calls, and medians in milliseconds: of the whole call at the caller, of its part on the wire
    and in queues, and of its part at the callee. The number of calls follows whose answer was not recorded: they have
    failed, the caller gave up, or their callee is not recorded.
    """
    counts, times = collections.Counter(), collections.defaultdict(list)
    answers = {call["args"]["call"]: (run, answered) for call, run, answered in calls}
    for call in made:
        name = call["name"].removesuffix(UNFINISHED)
        title = f"{processes[call['pid']]['name']} -> {call['args']['to']}: {name}"
        counts[title] += 1
        run, answered = answers.get(call["args"]["call"], (None, None))
        if run and is_answered(call, answered):
            at_callee = end_of(answered) - run["ts"]
            times[title].append((call["dur"], call["dur"] - at_callee, at_callee))
    width = max(26, *map(len, counts))
    lines = [f"{'RPCs, median milliseconds':<{width}}   calls   at caller wire, queue   at callee"]
    for title, count in sorted(counts.items()):
        medians = [statistics.median(column) / 1e3 for column in zip(*times[title], strict=True)]
        line = f"{title:<{width}}{count:>8,}" + "".join(f"{median:>12.3f}" for median in medians)
        missing = count - len(times[title])
        lines.append(line + (f"   {missing:,} without a recorded answer" if missing else ""))
    return "\n".join(lines)
