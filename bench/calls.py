"""Measure one call to another process: with torch RPC over both transports, with a Pipe, and with Ray.

    python bench/calls.py                                    # about a minute on 2 cores
    python bench/calls.py --rounds 1 --calls 50 --json calls.json
    python bench/calls.py --messages                         # how many messages torch sends for one call

Each call sends one payload to another process of this machine, where a function does nothing and returns None. In each
round, all ways to call are measured in turn. Each measurement starts the processes, and ends them. An idle rank would
slow down the next measurement, because the shm transport polls, and so keeps a core busy. The table shows medians over
the rounds. Ray has a row if it is installed (`pip install ray`).

torch RPC sends a tensor as it is. Pipe and Ray send the numpy array that shares the tensor's memory, because pickling a
torch tensor takes longer.
"""

import argparse
import collections
import contextlib
import ctypes
import functools
import importlib.util
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed.rpc as rpc

from common import interleave, rpc_worker, run_together, use_package, write_json

use_package("rl_rpc")

from glue import flags, host

PAYLOADS = {"4 floats": np.zeros(4, dtype=np.float32), "1 MB": torch.zeros(262_144)}
SMALL, LARGE = PAYLOADS
WARM_UP = 20  # calls with each payload that are not timed
TRANSPORTS = {"shm": ["shm", "uv"], "uv": ["uv"]}  # shm is torch's default on one machine, uv is TCP


# ----------------------------------------------------------------------------------- functions of the called process


def do_nothing(payload):
    """The function that is called by name."""


class Target:
    """The object whose method is called."""

    def do_nothing(self, payload):
        """Do nothing, like the function of the same name."""


def serve_rpc(transport, folder, pipe):
    with rpc_worker("server", ["server", "caller"], folder, _transports=TRANSPORTS[transport]):
        pass  # RPC threads serve until both processes have finished this block


def serve_pipe(folder, pipe):
    with contextlib.suppress(EOFError):  # the caller has ended
        while True:
            pipe.send(do_nothing(pipe.recv()))


def serve_nothing(folder, pipe):
    """Ray starts the process that it calls by itself."""


# ------------------------------------------------------------------------------------------------- the ways to call
#
# Each is a context manager that yields run(payload, calls). run makes `calls` calls, and returns the seconds of each.


@contextlib.contextmanager
def by_name(transport, folder, pipe):
    with rpc_worker("caller", ["server", "caller"], folder, _transports=TRANSPORTS[transport]):
        yield one_by_one(lambda payload: rpc.rpc_sync("server", do_nothing, args=(payload,)))


@contextlib.contextmanager
def by_proxy(transport, folder, pipe):
    with rpc_worker("caller", ["server", "caller"], folder, _transports=TRANSPORTS[transport]):
        rref = rpc.remote("server", Target)
        yield one_by_one(lambda payload: rref.rpc_sync().do_nothing(payload))


@contextlib.contextmanager
def eight_in_flight(transport, folder, pipe):
    with rpc_worker("caller", ["server", "caller"], folder, _transports=TRANSPORTS[transport]):
        yield in_flight(8, lambda payload: rpc.rpc_async("server", do_nothing, args=(payload,)))


@contextlib.contextmanager
def through_pipe(folder, pipe):
    def call(payload):
        pipe.send(as_array(payload))
        return pipe.recv()

    yield one_by_one(call)


@contextlib.contextmanager
def through_ray(folder, pipe):
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    actor = ray.remote(Target).remote()
    yield one_by_one(lambda payload: ray.get(actor.do_nothing.remote(as_array(payload))))
    ray.shutdown()


def as_array(payload):
    return payload.numpy() if isinstance(payload, torch.Tensor) else payload


def one_by_one(call):
    def run(payload, calls):
        seconds = []
        for _ in range(calls):
            started = time.perf_counter()
            call(payload)
            seconds.append(time.perf_counter() - started)
        return seconds

    return run


def in_flight(window, send):
    """Like one_by_one, but up to `window` calls are in flight. Their results are awaited in the order of sending."""

    def run(payload, calls):
        seconds = []
        under_way = collections.deque()

        def wait_for_oldest():
            started, future = under_way.popleft()
            future.wait()
            seconds.append(time.perf_counter() - started)

        for _ in range(calls):
            if len(under_way) == window:
                wait_for_oldest()
            under_way.append((time.perf_counter(), send(payload)))
        while under_way:
            wait_for_oldest()
        return seconds

    return run


# ----------------------------------------------------------------------------------------------------- measuring a way


class Way(NamedTuple):
    """A way to call. `connect` is the caller's context manager. `serve` is the function that the callee runs."""

    connect: object
    serve: object


def make_ways():
    """Return {name: Way} for the ways to call that work in this Python."""
    forms = {"by name": by_name, "through an RRef": by_proxy, "8 calls in flight": eight_in_flight}
    ways = {}
    for transport in TRANSPORTS:
        for name, connect in forms.items():
            serve = functools.partial(serve_rpc, transport)
            ways[f"torch RPC, {name}, {transport}"] = Way(functools.partial(connect, transport), serve)
    ways["multiprocessing Pipe"] = Way(through_pipe, serve_pipe)
    if importlib.util.find_spec("ray"):
        ways["Ray actor"] = Way(through_ray, serve_nothing)
    return ways


def figures_of(seconds, elapsed):
    """Return the figures of some calls. `seconds`: time of each call; `elapsed`: time of all calls together."""
    p50, p95 = np.percentile(seconds, [50, 95])
    return {"p50_ms": p50 * 1e3, "p95_ms": p95 * 1e3, "calls_per_second": len(seconds) / elapsed}


def call_all(run, schedule):
    """Make the calls of `schedule`, {payload's name: number of calls}; return {payload's name: figures}."""
    result = {}
    for name, calls in schedule.items():
        run(PAYLOADS[name], WARM_UP)
        started = time.perf_counter()
        seconds = run(PAYLOADS[name], calls)
        result[name] = figures_of(seconds, time.perf_counter() - started)
    return result


def in_caller(connect, work, folder, pipe):
    """Connect, and return the result of work(run). This function runs in the calling process."""
    with connect(folder, pipe) as run:
        return work(run)


def between_two_processes(way, work):
    """Start the two processes of `way`; return the result of work(run) in the calling process."""
    with tempfile.TemporaryDirectory() as folder:
        caller_end, server_end = multiprocessing.Pipe()
        caller = functools.partial(in_caller, way.connect, work, folder, caller_end)
        server = functools.partial(way.serve, folder, server_end)
        return run_together([caller, server], theirs=[caller_end, server_end])


# ---------------------------------------------------------------------------------------------------- counting messages


def count_messages(run, calls=10):
    """Return {"first": messages of the first call, "each": messages of a later call}, in both directions together.

    torch has no counter for messages. But RPC writes a line into its log for each message, at a log level that no
    public setting selects.
    """
    level = ctypes.c_int.in_dll(ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so"), "FLAGS_caffe2_log_level")
    with tempfile.TemporaryFile("w+") as log:
        plain = level.value
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        level.value = -1

        def messages_so_far():
            """Return the number of messages, when it has been the same for a second: some follow the end of a call."""
            before = None
            while before != (count := read_log(log)):
                before = count
                time.sleep(1)
            return count

        try:
            before = messages_so_far()
            run(PAYLOADS[SMALL], 1)
            first = messages_so_far() - before
            run(PAYLOADS[SMALL], calls)
            others = messages_so_far() - before - first
        finally:
            level.value = plain
            os.dup2(stderr, 2)
            os.close(stderr)
    return {"first": first, "each": others / calls}


def read_log(log):
    """Return how many messages the caller has sent and received, by the lines of its log."""
    log.seek(0)
    text = log.read()
    kinds = ("is sending request", "received response", "received request", "is sending response")
    return sum(text.count(kind) for kind in kinds)


# ----------------------------------------------------------------------------------------------------------- the table


def print_table(rows):
    """Print the table of docs/CONCEPTS.md, in Markdown."""
    payloads = [f"{name}: median (95th percentile), ms" for name in PAYLOADS]
    print(f"\n| way to call | {' | '.join(payloads)} | calls/s, {SMALL} |")
    print(f"|---{'|---' * len(PAYLOADS)}|---|")
    for way, runs in rows.items():
        cells = [f"{median_of(runs, name, 'p50_ms'):.2f} ({median_of(runs, name, 'p95_ms'):.2f})" for name in PAYLOADS]
        print(f"| {way} | {' | '.join(cells)} | {median_of(runs, SMALL, 'calls_per_second'):,.0f} |")


def median_of(runs, name, figure):
    return statistics.median(run[name][figure] for run in runs)


def compare_calls(args):
    """Measure all ways to call in turn, print the table, and return the raw numbers."""
    schedule = {SMALL: args.calls, LARGE: max(10, args.calls // 4)}
    work = functools.partial(call_all, schedule=schedule)
    variants = {name: functools.partial(between_two_processes, way, work) for name, way in make_ways().items()}
    print(f"{args.rounds} rounds of {args.calls} calls with {SMALL}, and {schedule[LARGE]} with {LARGE}")
    rows = interleave(variants, args.rounds)
    print_table(rows)
    return {"rounds": rows}


def compare_messages():
    """Count the messages of a call by name and of one through an RRef; print and return the counts."""
    ways = make_ways()
    print("\nmessages of one call, in both directions together")
    counts = {}
    for form in ("by name", "through an RRef"):
        counts[form] = between_two_processes(ways[f"torch RPC, {form}, shm"], count_messages)
        print(f"{form:15} {counts[form]['each']:3.0f}, the first call {counts[form]['first']}")
    return {"messages": counts}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="bench/calls.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=flags.positive_int, default=5, metavar="N", help="how often each way to call is measured")
    calls_help = "calls in a round; with 1 MB, a quarter of them"
    add("--calls", type=flags.positive_int, default=300, metavar="N", help=calls_help)
    add("--messages", action="store_true", help="only count the messages of a call")
    add("--json", metavar="FILE", help="write the raw numbers")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    started = time.perf_counter()
    print(f"torch {torch.__version__}, {host.usable_cores()} cores")
    write_json(args.json, compare_messages() if args.messages else compare_calls(args))
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
