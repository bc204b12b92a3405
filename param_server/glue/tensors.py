"""Tensors: on which device, with how many threads, how they cross the wire, and from which random numbers they come.

Runs in every process.
"""

import contextlib
import ctypes
import hashlib
import os
import warnings
from collections import Counter

import torch
import torch.distributed.rpc as rpc


def why_no_gpu():
    """Return why torch can use no GPU here, in one line, or "" where it can.  Starts CUDA, but uses no GPU yet."""
    with warnings.catch_warnings():
        # Two lines with a path; what is returned below says the same.
        warnings.filterwarnings("ignore", message="CUDA initialization|Can't .*(NVML|nvml)")
        if torch.cuda.is_available():
            return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter: this torch is built without CUDA
        return " ".join(str(error).split())
    return "torch.cuda.is_available() is False"


def gpu_names():
    """Return (the name of each GPU here, ""), or ([], why torch can use none, in one line)."""
    if why := why_no_gpu():
        return [], why
    try:
        return [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())], ""
    except RuntimeError as error:
        return [], " ".join(str(error).split())


def start_cuda(device, computes):
    """Start CUDA in this process; return how many GPUs this rank may use: 0 unless it `computes`, and on CUDA.

    Called before this rank has a heartbeat: it may take seconds, during which no other thread runs Python.  A rank on
    the CPU starts it as well, for torch would: init_rpc and the first backward() count the GPUs.
    """
    why = why_no_gpu()
    if device != "cuda" or not computes:
        return 0
    if why:
        raise RuntimeError(f"--device cuda: {why}")
    torch.cuda.init()  # what counts from now on is what CUDA sees, and not what the driver's library says: MIG
    return torch.cuda.device_count()


def devices_of(hellos):
    """Return each rank's device, as a string, from what the ranks said when they met: their host, and their GPUs.

    The ranks of a host take its GPUs in turn, and share them where there are few.
    """
    devices, ranks_before = [], Counter()
    for hello in hellos:
        if hello["gpus"]:
            devices.append(f"cuda:{ranks_before[hello['host']] % hello['gpus']}")
            ranks_before[hello["host"]] += 1
        else:
            devices.append("cpu")
    return devices


def built_in(option, names):
    """Return those of TensorPipe's `names` that this build of torch has.  `option`: _transports or _channels.

    There is no list to ask: torch refuses a name that it does not have (shm and cma are for Linux).
    """
    known = []
    for name in names:
        with contextlib.suppress(RuntimeError):
            rpc.TensorPipeRpcBackendOptions(**{option: [name]})
            known.append(name)
    return known


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
    the time of the small models here.  The benches call this too.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((-3, 1 << 30), (-1, 1 << 30), (-8, 1)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX
            mallopt(option, value)


def seed_for(seed, *parts):
    """Return a 63-bit seed for one stream of random numbers: from --seed and, say, a rank; well mixed, repeatable."""
    text = ",".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def dropout_mask(shape, p, *key, dtype=torch.float32):
    """Return a mask of dropout, on the CPU: 0 with probability `p`, and otherwise 1 / (1 - p).

    It depends on the `key` alone (numbers and strings: a seed, a step, a layer).  torch's own dropout takes the next
    numbers of a generator that all threads of the process share, so that with several RPC threads, or after a restart,
    the masks would be others; and a GPU would draw others than a CPU.
    """
    generator = torch.Generator().manual_seed(seed_for(*key))
    return torch.empty(shape, dtype=dtype).bernoulli_(1 - p, generator=generator).div_(1 - p)
