"""`--check`: print what a job finds on its hosts, and time an RPC between every two ranks.

Runs in every rank, instead of the scenario's run_worker.
"""

import socket
import statistics
import time

import torch
import torch.distributed.rpc as rpc

from glue import UserError
from glue.host import usable_cores, why_no_gpu
from glue.rendezvous import interface_towards

TRIES, SECONDS_TO_CONNECT = 50, 3.0


def run_worker(rank, args, job):
    interface, own_address = interface_towards(job.host)
    if rank == 0 or not job.spawned:
        print(f"host         {socket.gethostname()}")
        print(f"listens on   {own_address} ({interface}), the way to {job.host}")
        threads = f"{torch.get_num_threads()} intra-op thread(s) in each of {job.ranks_here} rank(s)"
        print(f"cores        {usable_cores()}: {threads}")
        places = ", ".join(dict.fromkeys(job.devices))
        why = why_no_gpu()
        gpus = f"0 ({why})" if why else f"{torch.cuda.device_count()} ({torch.cuda.get_device_name()})"
        print(f"GPUs         {gpus}; --device {args.device}: ranks on {places}")
        print(f"torch        {torch.__version__}", flush=True)
    _connect(rank, own_address, job)
    job.wait_for_all()  # not reached by a rank that has raised, so the job ends before init_rpc can hang
    rpc.init_rpc(job.workers[rank], rank=rank, world_size=job.world_size, rpc_backend_options=job.rpc_options())
    for peer in _others(rank, job):
        times = []
        for _ in range(TRIES):
            started = time.perf_counter()
            rpc.rpc_sync(job.workers[peer], torch.add, args=(torch.ones(4), 1))
            times.append(time.perf_counter() - started)
        milliseconds = statistics.median(times) * 1000
        print(f"round trip   {job.names[rank]} to {job.names[peer]}: {milliseconds:.2f} ms", flush=True)
    job.wait_for_all()
    rpc.shutdown()


def _others(rank, job):
    return [peer for peer in range(job.world_size) if peer != rank]


def _connect(rank, own_address, job):
    """Open a TCP connection to each other rank, because init_rpc does not name two ranks that have none."""
    listener = socket.create_server((own_address, 0), backlog=job.world_size)  # connections need not be accepted
    store, broken = job.store("check"), []
    store.set(str(rank), f"{listener.getsockname()[1]} {own_address}")
    for peer in _others(rank, job):
        port, address = store.get(str(peer)).decode().split()
        try:
            socket.create_connection((address, int(port)), SECONDS_TO_CONNECT).close()
        except OSError as error:
            broken.append(f"cannot reach {job.names[peer]}: {address}: {error}")
    job.wait_for_all()  # every rank has tried all others
    listener.close()
    if broken:
        raise UserError("; ".join(broken))
