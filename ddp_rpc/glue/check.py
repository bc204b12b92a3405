"""`--check`: explain this machine before the first run.  (The same file in all four packages.)

Runs instead of the scenario: in one process (`main.py --check`), which describes this machine, or in every rank
(`--rank R --check` in each terminal), where the ranks also meet, measure the round trip to each other, and say which
pair cannot talk.
"""

import glob
import os
import socket
import statistics
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from glue.addresses import interface_towards
from glue.job import PACKAGE
from glue.placement import device_of, usable_cores

TRIES, SECONDS_TO_CONNECT = 50, 3.0


def explain(args, meeting=False):
    """Print what a job would find on this machine (`meeting`: the port is in use, by the job itself)."""
    name = socket.gethostname()
    print(f"host         {name}, which resolves to {_resolve(name)} (not used: ranks listen on one interface, by name)")
    address = _resolve(args.master_addr)
    try:
        interface, own = interface_towards(address)
        print(f"listens on   {own} ({interface}), the way to --master_addr {args.master_addr} ({address})")
    except OSError as error:
        print(f"listens on   nothing: --master_addr {args.master_addr} ({address}) cannot be reached: {error}")
    if not meeting:
        taken = _holder_of(args.master_port)
        state = f"taken by {taken}: choose another --master_port" if taken else "free"
        print(f"port         {args.master_port} is {state} (spawned ranks need none: they take any free one)")
    cores = usable_cores()
    threads = max(1, cores // args.world_size)
    print(f"cores        {cores}, so {threads} intra-op thread(s) for each of {args.world_size} ranks on this machine")
    gpus = torch.cuda.device_count()
    named = ", ".join(torch.cuda.get_device_name(gpu) for gpu in range(gpus)) or "none"
    print(f"GPUs         {gpus} ({named}); --device {args.device}: {_devices(args)}")
    built = "built in" if dist.is_available() and rpc.is_available() else "NOT built in: no package here can run"
    print(f"torch        {torch.__version__}, torch.distributed.rpc {built}")
    if not meeting:
        print(f"next         python {PACKAGE}/main.py --world_size {args.world_size}")


def meet(job):
    """Meet the other ranks: plain TCP first, because it says which pair fails; then RPC's round trip to each."""
    if job.rank == 0 or not job.spawned:
        explain(job.args, meeting=True)
    peers = [rank for rank in range(job.world_size) if rank != job.rank]
    broken = _connect_to_each(job, peers)
    if any(broken.values()):
        job.wait_for_all()
        raise ConnectionError(
            "; ".join(f"cannot reach {job.names[rank]}: {why}" for rank, why in broken.items() if why)
        )
    job.wait_for_all()  # a rank that cannot reach another ends the job here, before RPC would wait for it
    name = job.worker_name(job.rank, job.args)
    rpc.init_rpc(name, rank=job.rank, world_size=job.world_size, rpc_backend_options=job.rpc_options())
    for rank in peers:
        times = []
        for _ in range(TRIES):
            started = time.perf_counter()
            rpc.rpc_sync(job.worker_name(rank, job.args), torch.add, args=(torch.ones(4), 1))
            times.append(time.perf_counter() - started)
        milliseconds = statistics.median(times) * 1000
        print(f"round trip   {job.names[job.rank]} to {job.names[rank]}: {milliseconds:.2f} ms", flush=True)
    job.wait_for_all()
    rpc.shutdown()


def _connect_to_each(job, peers):
    """Return peer -> why a TCP connection to it failed ("" when it did not)."""
    listener = socket.create_server((interface_towards(job.address[0])[1], 0))
    threading.Thread(target=_accept_all, args=(listener,), daemon=True).start()
    store = job.store("check")
    store.set(str(job.rank), "{}:{}".format(*listener.getsockname()))
    broken = {}
    for rank in peers:
        host, _, port = store.get(str(rank)).decode().partition(":")
        try:
            socket.create_connection((host, int(port)), SECONDS_TO_CONNECT).close()
            broken[rank] = ""
        except OSError as error:
            broken[rank] = f"{host}: {error}"
    return broken


def _accept_all(listener):
    while True:
        listener.accept()[0].close()


def _resolve(host):
    try:
        return socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError:
        return "nothing"


def _devices(args):
    devices = [str(device_of(rank, args)) for rank in range(args.world_size)]
    if args.device == "cpu":
        return "every rank on the CPU"
    return "ranks on " + ", ".join(devices)


def _holder_of(port):
    """Return who listens on this TCP port, as far as /proc lets this user see; "" if nobody does."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in list(file)[1:]]
        except OSError:
            continue
        inodes |= {
            row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
        }  # 0A: LISTEN
    if not inodes:
        return ""
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(link).removeprefix("socket:[").rstrip("]") in inodes:
                pid = link.split("/")[2]
                with open(f"/proc/{pid}/comm") as file:
                    return f"process {pid} ({file.read().strip()})"
        except OSError:
            continue
    return "a process of another user"
