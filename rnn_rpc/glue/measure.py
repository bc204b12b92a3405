"""Measuring: bytes on the wire, and runs beside each other in one table.

Runs in the ranks that count what they send, and in bench.py.
"""

import contextlib
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import psutil
from tqdm import tqdm

from glue import calls, trace


def wire_bytes():
    """Return how many bytes this process has sent and received over TCP so far, on all sockets that are open now.

    The kernel counts them (Linux, tcp(7): TCP_INFO).  With `--transport tcp` that is everything RPC moves; the other
    transports move tensors between processes of one host through memory.
    """
    total = 0
    for connection in psutil.Process().net_connections("tcp"):
        try:
            ours = socket.socket(fileno=os.dup(connection.fd))
        except OSError:  # closed since it was listed
            continue
        with ours:
            information = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            total += sum(struct.unpack_from("QQ", information, 120))  # tcpi_bytes_acked, tcpi_bytes_received
    return total


class Meter:
    """What the steps of a training loop cost this rank.  The loop says `with meter.step():` around each of them."""

    def __init__(self, transport, warm_up=0):
        """`transport`: bytes are counted only where all of them are seen, with "tcp"; `warm_up`: steps not timed."""
        self.count_bytes = transport == "tcp" and hasattr(socket, "TCP_INFO")
        self.warm_up = warm_up
        self.steps = self.timed_steps = self.rpc_calls = self.bytes = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def step(self):
        """Measure the block, which is one step."""
        calls_before = calls.so_far()
        bytes_before = wire_bytes() if self.count_bytes else 0
        started = time.perf_counter()
        with trace.bar("step", f"step {self.steps + 1}"):
            yield
        seconds = time.perf_counter() - started
        self.steps += 1
        if self.steps > self.warm_up:
            self.timed_steps += 1
            self.seconds += seconds
        self.rpc_calls += calls.so_far() - calls_before
        self.bytes += wire_bytes() - bytes_before if self.count_bytes else 0

    def over(self, batches):
        """Yield each of `batches`; the time until the next one is asked for is one step's."""
        for batch in batches:
            with self.step():
                yield batch

    def figures(self):
        """Return what a summary says of it: RPCs made and served, and TCP bytes sent and received, by this rank."""
        steps = max(1, self.steps)
        return {
            "rpc_calls": self.rpc_calls,
            "rpc_calls_per_step": round(self.rpc_calls / steps, 2),
            "wire_bytes_per_step": round(self.bytes / steps) if self.count_bytes else None,
        }


def run_main(package_dir, flags, timeout=900):
    """Run `main.py` with these flags in a process of its own; return its summary.  Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        summary = os.path.join(folder, "summary.json")
        command = [sys.executable, os.path.join(package_dir, "main.py"), *map(str, flags), "--summary_json", summary]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()}")
        with open(summary) as file:
            return json.load(file)


def places(device):
    """Return what a bench.py runs each mode on, as {suffix of its name: flags}; for "cuda", the CPU as well."""
    return {"": ["--device", "cpu"]} | ({", cuda": ["--device", "cuda"]} if device == "cuda" else {})


def interleave(variants, repeats=3):
    """Call each of `variants` (name -> callable returning a dict of figures) in turn, `repeats` times: A B C A B C ...

    A shared machine's speed drifts: what is compared is measured at nearly the same time.
    """
    rows = {name: [] for name in variants}
    with tqdm(total=repeats * len(variants), leave=False, disable=not sys.stderr.isatty()) as bar:
        for _ in range(repeats):
            for name, measure in variants.items():
                bar.set_postfix_str(name)
                rows[name].append(measure())
                bar.update()
    return rows


def table(rows, figure, baseline, title=None, digits=0):
    """Print each variant's median, spread and ratio to `baseline` (pair by pair); return the numbers."""
    width = max(len(name) for name in rows)
    print(f"\n{title or figure}\n{'':{width}} {'median':>12} {'min - max':>23} {'ratio to ' + baseline:>32}")
    result = {}
    for name, runs in rows.items():
        values = [run[figure] for run in runs]
        ratios = [run[figure] / base[figure] for run, base in zip(runs, rows[baseline], strict=True)]
        median, ratio = statistics.median(values), statistics.median(ratios)
        span = f"{min(values):,.{digits}f} - {max(values):,.{digits}f}"
        print(f"{name:{width}} {median:12,.{digits}f} {span:>23} {ratio:12.2f} ({min(ratios):.2f} - {max(ratios):.2f})")
        result[name] = {"median": median, "values": values, "ratio": ratio, "ratios": ratios}
    sys.stdout.flush()
    return result
