"""Measure what each step of a training loop costs the rank that runs the loop: time, RPCs, bytes on the wire.

Runs in the ranks that train.
"""

import contextlib
import os
import socket
import struct
import time

import psutil

from glue import trace


class Meter:
    """The cost of a training loop's steps on this rank.  The loop puts each step into a block `with meter.step():`."""

    def __init__(self, transport, warm_up=0):
        """`transport`: bytes are counted only with "tcp", where all go through sockets; `warm_up`: steps not timed."""
        self.count_bytes = transport == "tcp" and hasattr(socket, "TCP_INFO")
        self.warm_up = warm_up
        self.steps = 0
        self.timed_steps = 0
        self.seconds = 0.0
        self.rpc_calls = 0
        self.bytes = 0

    @contextlib.contextmanager
    def step(self):
        """Measure the block, which is one step."""
        calls_before = trace.calls_so_far()
        bytes_before = wire_bytes() if self.count_bytes else 0
        started = time.perf_counter()
        with trace.bar("step", f"step {self.steps + 1}"):
            yield
        seconds = time.perf_counter() - started
        self.steps += 1
        if self.steps > self.warm_up:
            self.timed_steps += 1
            self.seconds += seconds
        self.rpc_calls += trace.calls_so_far() - calls_before
        if self.count_bytes:
            self.bytes += wire_bytes() - bytes_before

    def figures(self):
        """Return figures for --summary_json: RPCs that this rank made and served, bytes that it sent and received.

        RPCs are counted only with --trace, and bytes only with --transport tcp.  A figure that was not counted is None.
        """
        steps = max(1, self.steps)
        counted = trace.is_recording()
        return {
            "rpc_calls": self.rpc_calls if counted else None,
            "rpc_calls_per_step": round(self.rpc_calls / steps, 2) if counted else None,
            "wire_bytes_per_step": round(self.bytes / steps) if self.count_bytes else None,
        }


def wire_bytes():
    """Return how many bytes this process has sent and received over TCP so far, on all sockets that are open now.

    The kernel counts them (Linux, tcp(7): TCP_INFO).  With `--transport tcp` these are all bytes of RPC.  The other
    transports move tensors through memory between processes of one host.
    """
    total = 0
    for connection in psutil.Process().net_connections("tcp"):
        try:
            ours = socket.socket(fileno=os.dup(connection.fd))
        except OSError:  # closed since it was listed
            continue
        with ours:
            information = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            acknowledged, received = struct.unpack_from("QQ", information, 120)  # tcpi_bytes_acked and _received
            total += acknowledged + received
    return total
