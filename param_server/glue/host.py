"""What this host offers to its ranks: GPUs, cores, transports, memory."""

import collections
import contextlib
import ctypes
import itertools
import os
import pathlib
import resource
import socket
import warnings

from glue import UserError

import psutil
import torch
import torch.distributed.rpc as rpc

# They take two lines with a path. The line that why_no_gpu() returns has the same information.
warnings.filterwarnings("ignore", message="CUDA initialization|Can't .*(NVML|nvml)")


def why_no_gpu():
    """Return one line that says why torch can use no GPU on this machine, or "" if it can."""
    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: this torch is built without CUDA
        return " ".join(str(error).split())
    return "torch.cuda.is_available() is False"


def devices_of(ranks):
    """Return each rank's device, as a string. `ranks`: by rank, a dict with its "host" and its number of "gpus".

    The ranks of a host are dealt to its GPUs in turn. If there are more ranks than GPUs, ranks share a GPU.
    """
    turn = collections.defaultdict(itertools.count)  # host -> how many of its ranks have a GPU
    return [f"cuda:{next(turn[each['host']]) % each['gpus']}" if each["gpus"] else "cpu" for each in ranks]


def tensorpipe_options(transport, **kwargs):
    """Return the options for init_rpc with this transport ("shm", "uv" or "tcp"). `kwargs` are passed to torch.

    torch has no public name for transports and channels, hence the underscores.
    """
    # The channel "basic" sends tensors together with their message; "cma" reads them from the peer's memory instead.
    # These are all channels for CPU tensors, in torch's own order. Without this option torch also creates those for
    # CUDA, which nothing uses: they fail if the driver is too old or if ranks see different GPUs, and they poll if
    # there is InfiniBand.
    channels = ["basic"] if transport in ("shm", "tcp") else ["cma", "mpt_uv", "basic"]
    transports = ["shm", "uv"] if transport == "shm" else ["uv"]
    try:
        return rpc.TensorPipeRpcBackendOptions(_transports=transports, _channels=channels, **kwargs)
    except (TypeError, RuntimeError):  # this torch has no such option, or this system no such transport (macOS)
        return rpc.TensorPipeRpcBackendOptions(**kwargs)


# The open files of a rank with this transport: without any other rank, and for each of them (measured in rank 0).
OPEN_FILES = {"shm": (40, 46), "uv": (150, 10), "tcp": (40, 10)}
SHM_BYTES = 16 << 20  # memory of a rank for each other rank on its host, over shm


def offer(args, uses_gpu):
    """Return what this process tells rank 0 about itself and its host, a dict."""
    if uses_gpu:
        torch.cuda.init()  # afterwards device_count() asks CUDA, not the driver's library; they can differ (MIG)
    return {
        "host": socket.gethostname(),
        "gpus": torch.cuda.device_count() if uses_gpu else 0,
        "transport": args.transport,
        "cores": usable_cores(),
        "memory": psutil.virtual_memory().available,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1] % (1 << 63),  # RLIM_INFINITY is -1 on Linux
    }


def transports_of(ranks):
    """Return each rank's transport. `ranks`: by rank, what offer() has returned. Raises UserError if they do not fit.

    Over shm a thread of each rank looks for messages all the time. With a core of its own, it sees an answer sooner
    than uv (TCP); without one, it keeps the rank from its work. So "auto" takes shm only if each rank has two cores,
    and if the descriptors and the memory of shm suffice.
    """
    size, hosts = len(ranks), [rank["host"] for rank in ranks]
    needed = {transport: alone + each * (size - 1) for transport, (alone, each) in OPEN_FILES.items()}
    transports = []
    for number, rank in enumerate(ranks):
        here = hosts.count(rank["host"])
        transport = rank["transport"]
        if transport == "auto":
            fits = needed["shm"] <= rank["files"] and here * (here - 1) * SHM_BYTES <= rank["memory"] // 2
            transport = "shm" if rank["cores"] >= 2 * here and fits else "uv"
        if needed[transport] > rank["files"]:
            need = f"{size} ranks over {transport} need {needed[transport]} open files in each"
            cure = "raise the limit (ulimit -n)" + (", or use --transport uv" if transport == "shm" else "")
            raise UserError(f"{need}, and rank {number} may have {rank['files']}: {cure}, or start fewer ranks")
        transports.append(transport)
    return transports


def allow_open_files():
    """Let this process, and those that it starts, have as many open files as the hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS says that there is no limit, but does not accept this
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def usable_cores():
    """Return how many cores this process may use: those on which it may run, or fewer if its container has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # Of `docker run --cpus 2`, for example. Outside of containers there is no such file, or it says "max".
    with contextlib.suppress(OSError, ValueError):
        limit, period = map(int, pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, limit // period)
    return max(1, cores)


def share_cores(among):
    """Set the number of intra-op threads to this process's share of the cores, unless OMP_NUM_THREADS sets it.

    `among`: how many ranks share the cores. With 1, this one uses all of them.
    """
    if "OMP_NUM_THREADS" not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun sets it to 1
        torch.set_num_threads(max(1, usable_cores() // among))


def keep_freed_memory():
    """Let malloc keep freed memory for the next tensors, if it is glibc's. Call it before other threads start.

    By default malloc returns large blocks to the kernel, and each iteration pays for the page faults when it gets them
    again: a fifth of the time of this repository's small models.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        m_mmap_threshold, m_trim_threshold, m_arena_max = -3, -1, -8
        # According to its source, a glibc before 2.35 refuses more than 32 MB, and then sets no threshold at all.
        if not mallopt(m_mmap_threshold, 1 << 30):
            mallopt(m_mmap_threshold, 32 << 20)
        mallopt(m_trim_threshold, 1 << 30)
        mallopt(m_arena_max, 1)  # so that what one thread frees serves all
