"""`--check`: print what joining the job has shown about its hosts, and time an RPC between every two ranks.

Runs in every rank, instead of the scenario's run_worker.
"""

import contextlib
import functools
import socket
import statistics
import time
import timeit

from glue import UserError
from glue.host import usable_cores, why_no_gpu

import torch
import torch.distributed.rpc as rpc

TRIES, RPC_TIMEOUT = 50, 5.0


def seconds_of_dns():
    """Return how long DNS takes to say that it does not know the name of an address, which torch's store asks for."""
    started = time.perf_counter()
    with contextlib.suppress(socket.gaierror):
        socket.getnameinfo(("::ffff:127.0.0.1", 0, 0, 0), 0)
    return time.perf_counter() - started


def run_worker(rank, args, job):
    if rank == 0 or not job.spawned:
        why = why_no_gpu()
        gpus = f"0 ({why})" if why else f"{torch.cuda.device_count()} ({torch.cuda.get_device_name()})"
        print(f"host         {socket.gethostname()}")
        print(f"listens on   {job.listens_on}, the way to {job.host}")
        threads = f"{torch.get_num_threads()} intra-op thread(s) in each of {job.ranks_here} rank(s)"
        print(f"cores        {usable_cores()}: {threads}")
        if (seconds := seconds_of_dns()) > 0.5:
            print(f"DNS          silent: each process waits {seconds:.1f} s for it when the job starts")
        print(f"GPUs         {gpus}; --device {args.device}: ranks on {', '.join(dict.fromkeys(job.devices))}")
        print(f"torch        {torch.__version__}")
    args.rpc_timeout = RPC_TIMEOUT  # job.rpc_options() reads it
    awaited = "all ranks"
    try:
        rpc.init_rpc(job.workers[rank], rank=rank, world_size=job.world_size, rpc_backend_options=job.rpc_options())
        for peer in sorted({*range(job.world_size)} - {rank}):
            awaited = job.names[peer]
            call = functools.partial(rpc.rpc_sync, job.workers[peer], torch.add, args=(torch.ones(4), 1))
            milliseconds = 1000 * statistics.median(timeit.repeat(call, number=1, repeat=TRIES))
            print(f"round trip   {job.names[rank]} to {awaited}: {milliseconds:.2f} ms")
    except RuntimeError as error:
        raise UserError(f"cannot reach {awaited}: {error}") from error
    job.wait_for_all()
    rpc.shutdown()
