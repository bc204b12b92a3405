"""Measure one call to another process: with torch RPC over both transports, with a Pipe, and with a Ray actor.

    python bench/calls.py                                    # a minute on 2 cores
    python bench/calls.py --repeats 1 --calls 50

Each call sends one payload to another process of this machine, where a function does nothing and returns None. In each
round, all ways to call are measured in turn. Each measurement starts two processes, and ends them: an idle rank would
slow down the next measurement, because the shm transport polls, and so keeps a core busy. The table shows medians over
the rounds. A Pipe and Ray send the numpy array that shares the tensor's memory, because pickling a torch tensor takes
longer. Ray has a row if it is installed (`pip install ray`).
"""

import argparse
import collections
import functools
import importlib.util
import itertools
import json
import os
import statistics
import tempfile
import time
import types
import warnings

import numpy as np
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

PAYLOADS = {"4 floats": torch.from_numpy(np.zeros(4, "f")), "1 MB": torch.from_numpy(np.zeros(262_144, "f"))}
SMALL, LARGE = PAYLOADS
WARM_UP = 20  # calls with each payload that are not timed
FORMS = {"by name": 1, "through an RRef": 1, "8 calls in flight": 8}  # how many calls are in flight together
TRANSPORTS = {"shm": ["shm", "uv"], "uv": ["uv"]}  # shm is torch's default on one machine, uv is TCP
PIPE, RAY = ("Pipe", None), ("Ray actor", None)


class Target:
    """The object whose method is called."""

    def do_nothing(self, payload):
        """Do nothing, like the function of the same name."""


def do_nothing(payload):
    """The function that is called by name."""


def run_process(rank, form, transport, schedule, folder, pipes, results):
    """Run the process that is called (rank 0), or the one that calls. It puts the figures of its calls into a queue."""
    if transport:
        os.environ.update({"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"})  # listen on loopback only
        warnings.filterwarnings("ignore", "You are using a Backend")  # torch's own init_rpc causes this warning
        meet = {"init_method": f"file://{folder}/rpc", "_transports": TRANSPORTS[transport]}
        options = rpc.TensorPipeRpcBackendOptions(**meet)
        rpc.init_rpc(["server", "caller"][rank], rank=rank, world_size=2, rpc_backend_options=options)
    elif rank == 0 and form == "Pipe":
        while pipes[0].recv() is not None:
            pipes[0].send(None)
    if rank == 1:  # (Ray starts a process of its own for the actor)
        send = way_to_send(form, pipes[1])
        results.put({name: time_calls(send, name, calls, FORMS.get(form, 1)) for name, calls in schedule.items()})
    if transport:
        rpc.shutdown()  # the server serves until the caller comes here too
    elif rank == 1 and form == "Pipe":
        pipes[1].send(None)


def way_to_send(form, pipe):
    """Return a function that sends a payload; its result has a method wait, which returns when the answer is there."""

    def send(payload):
        pipe.send(payload.numpy())
        return types.SimpleNamespace(wait=pipe.recv)

    if form == "Pipe":
        return send
    if form == "Ray actor":
        import ray

        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        call = ray.remote(Target).remote().do_nothing.remote
        return lambda payload: types.SimpleNamespace(wait=functools.partial(ray.get, call(payload.numpy())))
    if form == "through an RRef":
        rref = rpc.remote("server", Target)
        return lambda payload: rref.rpc_async().do_nothing(payload)
    return lambda payload: rpc.rpc_async("server", do_nothing, args=(payload,))


def time_calls(send, name, calls, most_in_flight):
    """Return the figures of some calls. The answers are awaited in the order of sending."""
    for _ in range(WARM_UP):
        send(PAYLOADS[name]).wait()
    seconds, in_flight, began = [], collections.deque(), time.perf_counter()
    for number in range(calls + most_in_flight):
        if number >= most_in_flight:
            sent, answer = in_flight.popleft()
            answer.wait()
            seconds.append(time.perf_counter() - sent)
        if number < calls:
            in_flight.append((time.perf_counter(), send(PAYLOADS[name])))
    p50, p95 = np.percentile(seconds, [50, 95]) * 1e3
    return {"p50": p50, "p95": p95, "calls per second": calls / (time.perf_counter() - began)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds; each measures every way once (5)")
    parser.add_argument("--calls", type=int, default=300, metavar="N", help="with 1 MB, a quarter of them (300)")
    parser.add_argument("--json", metavar="FILE", help="write the figures of all rounds")
    args = parser.parse_args()
    schedule = {SMALL: args.calls, LARGE: max(10, args.calls // 4)}
    ways = [*itertools.product(FORMS, TRANSPORTS), PIPE, *[RAY] * bool(importlib.util.find_spec("ray"))]
    runs = collections.defaultdict(list)
    for _, way in itertools.product(range(args.repeats), ways):
        with tempfile.TemporaryDirectory() as folder:
            results = mp.get_context("fork").SimpleQueue()
            arguments = (*way, schedule, folder, mp.Pipe(), results)
            mp.start_processes(run_process, arguments, nprocs=2, start_method="fork")
            runs[way].append(results.get())

    def median_of(way, name, figure):
        return statistics.median(run[name][figure] for run in runs[way])

    print(f"torch {torch.__version__}, {args.repeats} rounds of {args.calls} calls\n")
    print("| way to call |", "".join(f" {name}: median (95th percentile), ms |" for name in PAYLOADS), "calls/s |")
    print("|---|" + "---|" * (len(PAYLOADS) + 1))
    for way in sorted(ways, key=lambda way: str(way[1])):
        cells = "".join(
            f" {median_of(way, name, 'p50'):.2f} ({median_of(way, name, 'p95'):.2f}) |" for name in PAYLOADS
        )
        print(f"| {way[0]}, {way[1]} |{cells} {median_of(way, SMALL, 'calls per second'):,.0f} |")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({f"{form}, {transport}": rounds for (form, transport), rounds in runs.items()}, file, indent=2)


if __name__ == "__main__":
    main()
