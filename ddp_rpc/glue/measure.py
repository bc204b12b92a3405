"""Measuring: bytes on the wire, and runs beside each other in one table.

Runs in the ranks that count what they send, and in bench.py.
"""

import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile

from tqdm import tqdm


def wire_bytes():
    """Return how many bytes this process has sent and received over TCP so far, on all sockets that are open now.

    The kernel counts them (Linux, tcp(7): TCP_INFO).  With `--transport tcp` that is everything RPC moves; the other
    transports move tensors between processes of one host through memory.
    """
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        if not _is_socket(descriptor):
            continue
        connection = socket.socket(fileno=os.dup(int(descriptor)))
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += sum(struct.unpack_from("QQ", information, 120))  # tcpi_bytes_acked, tcpi_bytes_received
    return total


def _is_socket(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    except OSError:  # closed since it was listed
        return False


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
    """What a bench.py runs each mode on, as {suffix of the variant's name: flags}.

    For "cuda": the CPU of the same machine, the GPU, and the GPU with tensors that cross the wire by way of the CPU.
    """
    flags = {"": ["--device", "cpu"]}
    if device == "cuda":
        flags |= {", cuda": ["--device", "cuda"], ", cuda, --wire cpu": ["--device", "cuda", "--wire", "cpu"]}
    return flags


def interleave(variants, repeats=3):
    """Call each of `variants` (name -> callable returning a dict of figures) in turn, `repeats` times: A B C A B C ...

    Interleaved, because a shared machine's speed drifts: what is compared is measured at nearly the same time.
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
