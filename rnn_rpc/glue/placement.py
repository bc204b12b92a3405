"""Where tensors and threads are: each rank's device, cores and memory, and how a tensor crosses the wire.

Runs in every process.
"""

import contextlib
import ctypes
import os

import torch


def device_of(rank, args):
    """Return the torch.device of a rank's tensors: ranks take the GPUs in turn, and share them where there are few."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if args.device == "cuda" else torch.device("cpu")


def to_wire(tensor):
    """Return `tensor` as it crosses RPC: on the CPU, always.  Every tensor that is sent passes here.

    torch's documentation calls RPC's CUDA support beta and discourages it for RRef, distributed autograd and optimizer.
    Autograd follows this copy, and the .to(device) at the other end, by itself.
    """
    return tensor.cpu()


def usable_cores():
    """Return how many cores this process may use: OMP_NUM_THREADS of them, if set, else all that it may run on."""
    wanted = None if "TORCHELASTIC_RUN_ID" in os.environ else os.environ.get("OMP_NUM_THREADS")  # torchrun sets it to 1
    return int(wanted or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))


def share_cores(workers):
    """Give this process's tensor operations its share of the cores, if so many processes work here at once."""
    torch.set_num_threads(max(1, usable_cores() // workers))


@contextlib.contextmanager
def all_cores():
    """Take every core while the block runs: for work that all others wait for, like an evaluation."""
    before = torch.get_num_threads()
    share_cores(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def keep_freed_memory():
    """Let this process keep freed memory for its next tensors (before other threads start; glibc only, else no effect).

    By default malloc returns large blocks to the kernel, and each iteration pays for faulting them in again: a fifth of
    the time of the small models here.  bench.py calls this too.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-3, 1 << 30), (-1, 1 << 30), (-8, 1)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX
            mallopt(option, value)
