"""Measure one call to another process, with the different forms of torch RPC and with other libraries.

    python bench/calls.py                            # about two minutes on 2 cores
    python bench/calls.py --rounds 1 --calls 50      # a quick run
    python bench/calls.py --ray_python DIR/bin/python --monarch_python DIR/bin/python --json calls.json
    python bench/calls.py --messages                 # how many messages torch sends for one call

Each call sends one payload to another process of this machine, where a function does nothing and returns None. In each
round, all ways to call are measured in turn. Each measurement starts two processes, and ends them. An idle rank would
slow down the next measurement, because the shm transport polls, and so keeps a core busy. (The actors of Ray and
Monarch are started only once.)  The tables show medians over the rounds.

torch RPC sends a tensor as it is. Pipe, gRPC, Ray and Monarch send the numpy array that shares the tensor's memory,
because pickling a torch tensor takes longer. gloo sends only tensors. With gloo the payload "nothing" is a tensor of
one byte, and the payload "array of 4 floats" is a tensor of 16 bytes.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import functools
import importlib.util
import json
import multiprocessing
import os
import pathlib
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from common import interleave, rpc_worker, run_together, spread, use_package, write_json

use_package("rl_rpc")

from glue import flags, host

PAYLOADS = {
    "nothing": None,
    "array of 4 floats": np.zeros(4, dtype=np.float32),
    "tensor of 1 KB": torch.zeros(256),
    "tensor of 1 MB": torch.zeros(262_144),
}
SMALL, LARGE = "array of 4 floats", "tensor of 1 MB"
WARM_UP = 20  # calls with each payload that are not timed
FORMS = ["torch RPC, function by name", "torch RPC, RRef as argument", "torch RPC, RRef proxy"]
BASELINE = "torch RPC, function by name, shm"
TRANSPORTS = {"shm": ["shm", "uv"], "uv": ["uv"]}  # shm is torch's default on one machine, uv is TCP


# ----------------------------------------------------------------------------------- functions of the called process


def do_nothing(payload):
    """The function that is called by name."""


def do_nothing_with(rref, payload):
    """Call do_nothing of the object to which `rref` refers."""
    return rref.local_value().do_nothing(payload)


class Target:
    """The object whose method is called."""

    def do_nothing(self, payload):
        """Do nothing, like the function of the same name."""


def serve_rpc(transport, folder, pipe, schedule):
    with rpc_worker("server", ["server", "caller"], folder, _transports=TRANSPORTS[transport]):
        pass  # RPC threads serve until both processes have finished this block


def serve_pipe(folder, pipe, schedule):
    with contextlib.suppress(EOFError):  # the caller has ended
        while True:
            pipe.send(do_nothing(pipe.recv()))


def serve_gloo(folder, pipe, schedule):
    """Receive each message and answer it. With gloo the receiver must know size and number in advance."""
    join_gloo(0, folder)
    answer = torch.zeros(1, dtype=torch.uint8)
    for name, calls in schedule.items():
        buffer = torch.empty_like(bytes_of(PAYLOADS[name]))
        for _ in range(WARM_UP + calls):
            dist.recv(buffer, 1)
            dist.send(answer, 1)
    dist.destroy_process_group()


def serve_grpc(folder, pipe, schedule):
    import grpc

    def answer(message, _context):
        return pickle.dumps(do_nothing(pickle.loads(message)))

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(16))
    methods = {"do_nothing": grpc.unary_unary_rpc_method_handler(answer)}  # without a schema, gRPC sends plain bytes
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("calls", methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    with contextlib.suppress(EOFError):
        pipe.recv()  # raises EOFError when the caller has ended
    server.stop(None).wait()


# ------------------------------------------------------------------------------------------------- the ways to call
#
# Each is a context manager that yields run(payload, calls). run makes `calls` calls, and returns the seconds of each.


@contextlib.contextmanager
def by_name(transport, folder, pipe):
    with rpc_worker("caller", ["server", "caller"], folder, _transports=TRANSPORTS[transport]):
        yield one_by_one(lambda payload: rpc.rpc_sync("server", do_nothing, args=(payload,)))


@contextlib.contextmanager
def by_argument(transport, folder, pipe):
    with rpc_worker("caller", ["server", "caller"], folder, _transports=TRANSPORTS[transport]):
        rref = rpc.remote("server", Target)
        yield one_by_one(lambda payload: rpc.rpc_sync(rref.owner(), do_nothing_with, args=(rref, payload)))


@contextlib.contextmanager
def by_proxy(transport, folder, pipe):
    with rpc_worker("caller", ["server", "caller"], folder, _transports=TRANSPORTS[transport]):
        rref = rpc.remote("server", Target)
        yield one_by_one(lambda payload: rref.rpc_sync().do_nothing(payload))


@contextlib.contextmanager
def asynchronously(window, transport, folder, pipe):
    with rpc_worker("caller", ["server", "caller"], folder, _transports=TRANSPORTS[transport]):
        yield in_flight(window, lambda payload: rpc.rpc_async("server", do_nothing, args=(payload,)))


@contextlib.contextmanager
def through_pipe(folder, pipe):
    def call(payload):
        pipe.send(as_array(payload))
        return pipe.recv()

    yield one_by_one(call)


@contextlib.contextmanager
def through_gloo(folder, pipe):
    join_gloo(1, folder)
    answer = torch.empty(1, dtype=torch.uint8)

    def call(payload):
        dist.send(bytes_of(payload), 0)
        dist.recv(answer, 0)

    yield one_by_one(call)
    dist.destroy_process_group()


@contextlib.contextmanager
def through_grpc(folder, pipe):
    import grpc

    options = [("grpc.enable_http_proxy", 0)]  # the environment may name a proxy
    with grpc.insecure_channel(f"127.0.0.1:{pipe.recv()}", options) as channel:
        method = channel.unary_unary("/calls/do_nothing")
        yield one_by_one(lambda payload: pickle.loads(method(pickle.dumps(as_array(payload)))))


def as_array(payload):
    return payload.numpy() if isinstance(payload, torch.Tensor) else payload


def bytes_of(payload):
    if payload is None:
        return torch.zeros(1, dtype=torch.uint8)
    return torch.as_tensor(payload).view(torch.uint8)


def join_gloo(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=2)


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
    ways = {
        "multiprocessing Pipe": Way(through_pipe, serve_pipe),
        "gloo send and recv": Way(through_gloo, serve_gloo),
        "gRPC": Way(through_grpc, serve_grpc),
    }
    forms = dict(zip(FORMS, [by_name, by_argument, by_proxy], strict=True)) | {
        "torch RPC, rpc_async, 1 in flight": functools.partial(asynchronously, 1),
        "torch RPC, rpc_async, 8 in flight": functools.partial(asynchronously, 8),
        "torch RPC, rpc_async, 64 in flight": functools.partial(asynchronously, 64),
    }
    for transport in TRANSPORTS:
        for name, connect in forms.items():
            serve = functools.partial(serve_rpc, transport)
            ways[f"{name}, {transport}"] = Way(functools.partial(connect, transport), serve)
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


def between_two_processes(way, work, schedule):
    """Start the two processes of `way`; return the result of work(run) in the calling process."""
    with tempfile.TemporaryDirectory() as folder:
        caller_end, server_end = multiprocessing.Pipe()
        caller = functools.partial(in_caller, way.connect, work, folder, caller_end)
        server = functools.partial(way.serve, folder, server_end, schedule)
        return run_together([caller, server], theirs=[caller_end, server_end])


# ----------------------------------------------------------------------------------- ways to call in another Python


class Actor:
    """A subprocess that runs actors.py, in the Python of Ray or Monarch. actors.py calls an actor."""

    def __init__(self, library, python):
        """Start the subprocess; raise RuntimeError if it fails. `missing`: None, or why the library is missing."""
        command = [python, str(pathlib.Path(__file__).with_name("actors.py")), library]
        self.process = None
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            self.missing = f"{python}: {error.strerror}"
        else:
            self.missing = self.read_answer()["missing"]

    def measure(self, schedule):
        """Return {payload's name: figures}."""
        result = {}
        for name, calls in schedule.items():
            payload = PAYLOADS[name]
            floats = None if payload is None else len(payload)
            request = json.dumps({"floats": floats, "warm_up": WARM_UP, "calls": calls})
            print(request, file=self.process.stdin, flush=True)
            answer = self.read_answer()
            result[name] = figures_of(answer["seconds"], answer["elapsed"])
        return result

    def read_answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self.process.args)} ended with status {self.process.wait()}")
        return json.loads(line)

    def end(self):
        if self.process:
            self.process.stdin.close()
            self.process.wait()


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
            run(None, 1)
            first = messages_so_far() - before
            run(None, calls)
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


# ---------------------------------------------------------------------------------------------------------- the tables


def print_table(name, rows, missing):
    """Print the table for the payload `name`."""
    width = max(map(len, rows | missing))
    print(f"\n{name}")
    print(f"{'way to call':{width}} {'p50 ms (min - max)':>22} {'p95 ms (min - max)':>22} {'calls/s (min - max)':>26}")
    for way, runs in rows.items():
        cells = [
            spread([run[name]["p50_ms"] for run in runs], 2, 22),
            spread([run[name]["p95_ms"] for run in runs], 2, 22),
            spread([run[name]["calls_per_second"] for run in runs], 0, 26),
        ]
        print(f"{way:{width}} {' '.join(cells)}")
    for way, why in missing.items():
        print(f"{way:{width}} not installed ({why})")


def print_page(rows, missing):
    """Print the table of docs/CONCEPTS.md, in Markdown."""
    ratio = "ratio of the median to `by name, shm`"
    print(f"\n| way to call | {' | '.join(PAYLOADS)} | calls/s, {SMALL} | {ratio}, {SMALL} |")
    print(f"|---{'|---' * len(PAYLOADS)}|---|---|")
    for way, runs in rows.items():
        cells = [f"{median_of(runs, name, 'p50_ms'):.2f} ({median_of(runs, name, 'p95_ms'):.2f})" for name in PAYLOADS]
        ratios = [run[SMALL]["p50_ms"] / base[SMALL]["p50_ms"] for run, base in zip(runs, rows[BASELINE], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {way} | {' | '.join(cells)} | {median_of(runs, SMALL, 'calls_per_second'):,.0f} | {ratio} |")
    for way in missing:
        print(f"| {way} | not installed |{' |' * (len(PAYLOADS) + 1)}")


def median_of(runs, name, figure):
    return statistics.median(run[name][figure] for run in runs)


def compare_calls(args):
    """Measure all ways to call in turn, print the tables, and return the raw numbers."""
    schedule = {name: args.calls for name in PAYLOADS}
    schedule[LARGE] = max(10, args.calls // 4)
    ways = make_ways()
    missing = {}
    if importlib.util.find_spec("grpc") is None:
        missing["gRPC"] = "No module named 'grpc'"
        del ways["gRPC"]
    work = functools.partial(call_all, schedule=schedule)
    variants = {name: functools.partial(between_two_processes, way, work, schedule) for name, way in ways.items()}
    actors = {"Ray actor": Actor("ray", args.ray_python), "Monarch actor": Actor("monarch", args.monarch_python)}
    for name, actor in actors.items():
        if actor.missing:
            missing[name] = actor.missing
        else:
            variants[name] = functools.partial(actor.measure, schedule)
    print(f"{args.rounds} rounds of {args.calls} calls with each payload ({schedule[LARGE]} with the largest)")
    rows = interleave(variants, args.rounds)
    for actor in actors.values():
        actor.end()
    for name in PAYLOADS:
        print_table(name, rows, missing)
    if args.markdown:
        print_page(rows, missing)
    return {"rounds": rows, "not installed": missing}


def compare_messages():
    """Count the messages of a call in each form of torch RPC; print and return the counts."""
    ways = make_ways()
    print("\nmessages of one call, in both directions together")
    counts = {}
    for form in FORMS:
        counts[form] = between_two_processes(ways[f"{form}, shm"], count_messages, {})
        print(f"{form:30} {counts[form]['each']:3.0f}, the first call {counts[form]['first']}")
    return counts


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="bench/calls.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=flags.positive_int, default=5, metavar="N", help="how often each way to call is measured")
    calls_help = "calls with each payload in a round; with 1 MB, a quarter of them"
    add("--calls", type=flags.positive_int, default=300, metavar="N", help=calls_help)
    add("--ray_python", default=sys.executable, metavar="FILE", help="the Python that has Ray")
    add("--monarch_python", default=sys.executable, metavar="FILE", help="the Python that has Monarch")
    add("--markdown", action="store_true", help="also print the table of docs/CONCEPTS.md")
    add("--messages", action="store_true", help="only count the messages of a call")
    add("--json", metavar="FILE", help="write the raw numbers")
    return parser.parse_args(argv)


def main():
    args = parse_args()
    started = time.perf_counter()
    print(f"torch {torch.__version__}, {host.usable_cores()} cores")
    if args.messages:
        numbers = {"messages": compare_messages()}
    else:
        numbers = compare_calls(args)
        numbers["messages"] = compare_messages()
    write_json(args.json, numbers)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
