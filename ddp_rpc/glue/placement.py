"""Where tensors and threads are: each rank's device, its share of the cores, and what a tensor needs to cross RPC.

Runs in every process.
"""

import os

import torch


def device_of(rank, args):
    """Return the torch.device of a rank's tensors: ranks take the GPUs in turn, and share them where there are few."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if args.device == "cuda" else torch.device("cpu")


def to_wire(tensor, args):
    """Return `tensor` as it may cross RPC: a CUDA tensor as it is only with --wire direct."""
    return tensor if args.device == "cuda" and args.wire == "direct" else tensor.cpu()


def usable_cores():
    """Return how many cores this process may use: OMP_NUM_THREADS of them, if set, else all that it may run on."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
