"""Run a package's main.py, and count the bytes that each rank sends and receives over TCP in its training steps.

    python bench/bytes_per_step.py rnn_rpc --epochs 1

--transport tcp is added to the flags of main.py: with the other transports, tensors move through memory between
processes of one host. A step is what main.py marks as such for torch's profiler. Each rank that makes steps prints a
line with its count: the trainers, or rank 0 where it leads each of their steps (param_server, mode replica).
"""

import os
import re
import socket
import statistics
import struct
import sys

import psutil
import torch

from common import ROOT, use_package

LINE = re.compile(r"Bytes on the wire per step: (\d+)\n")
COUNTED = []  # what this process had sent and received before its first step, and after each


def wire_bytes():
    """Return how many bytes this process has sent and received over TCP so far, on all sockets that are open now.

    The kernel counts them (Linux, tcp(7): TCP_INFO).
    """
    total = 0
    for connection in psutil.Process().net_connections("tcp"):
        try:
            ours = socket.socket(fileno=os.dup(connection.fd))
        except OSError:  # closed since it was listed
            continue
        with ours:
            information = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
            # tcpi_bytes_received and _sent. The acknowledgement of what was sent may come 0.2 s later.
            total += sum(struct.unpack_from("Q", information, offset)[0] for offset in (128, 200))
    return total


class Counting(torch.profiler.record_function):
    """`with record_function("step")` notes in COUNTED the bytes so far. Some may arrive between two steps."""

    def __enter__(self):
        if self.name == "step" and not COUNTED:
            COUNTED.append(wire_bytes())
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        if self.name == "step":
            COUNTED.append(wire_bytes())


def per_step(out):
    """Return the mean of the counts in the output of this program."""
    return round(statistics.mean(map(int, LINE.findall(out))))


def run_worker(rank, args, job):
    torch.profiler.record_function = Counting
    main.run_worker(rank, args, job)
    if COUNTED:
        # The line break is part of the text: print would write it apart, perhaps after another rank's line.
        print(f"Bytes on the wire per step: {(COUNTED[-1] - COUNTED[0]) // (len(COUNTED) - 1)}\n", end="", flush=True)


if __name__ in ("__main__", "__mp_main__"):  # the second name is the one in a spawned rank
    use_package(sys.argv[1])
    sys.argv[0] = str(ROOT / sys.argv[1] / "main.py")

    from glue import launch

    import main

if __name__ == "__main__":
    launch.launch(run_worker, main.parse_args([*sys.argv[2:], "--transport", "tcp"]), main.scenario)
