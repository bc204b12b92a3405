"""Where tensors and threads are: each rank's device, its share of the cores, and how a tensor crosses the wire.

Runs in every process.
"""

import contextlib
import os

import torch


def device_of(rank, args):
    """Return the torch.device of a rank's tensors: ranks take the GPUs in turn, and share them where there are few."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if args.device == "cuda" else torch.device("cpu")


def to_wire(tensor):
    """Return `tensor` as it crosses RPC: on the CPU, always.  Every tensor that is sent passes here.

    torch's own documentation calls RPC's CUDA support beta and discourages it for RRef, distributed autograd and the
    distributed optimizer.  Autograd follows this copy, and the .to(device) at the other end, by itself.
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
