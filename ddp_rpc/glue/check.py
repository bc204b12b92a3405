"""`--check`: print what a job would find on this machine.

Runs instead of the scenario.  Without `--rank` it runs in one process.  With `--rank R` it runs in every rank, and the
ranks also meet and test the connections between them.
"""

import socket
import statistics
import threading
import time

import psutil
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc

from glue import UserError
from glue.ending import PACKAGE
from glue.rendezvous import interface_towards
from glue.tensors import devices_of, gpu_names, usable_cores

TRIES, SECONDS_TO_CONNECT = 50, 3.0


def explain(args, devices=None):
    """Print what a job would find on this machine.

    `devices`: the ranks' devices, if the ranks have met already.  Then they use the port, and it is not checked.
    """
    name = socket.gethostname()
    meeting = devices is not None
    print(f"host         {name}, which resolves to {_resolve(name)} (not used: ranks use the address in the next line)")
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
    ranks = args.world_size
    print(f"cores        {cores}, so {max(1, cores // ranks)} intra-op thread(s) for each of {ranks} ranks here")
    gpus, why = gpu_names()
    if not meeting:
        on_gpu = args.device_ranks if args.device == "cuda" else []
        devices = devices_of([{"host": name, "gpus": len(gpus) * (rank in on_gpu)} for rank in range(ranks)])
    places = ", ".join(dict.fromkeys(devices))
    print(f"GPUs         {len(gpus)} ({', '.join(gpus) or why}); --device {args.device}: ranks on {places}")
    usable = dist.is_available() and rpc.is_available()
    built = "built in" if usable else "NOT built in: no package of this repository can run"
    print(f"torch        {torch.__version__}, torch.distributed.rpc {built}")
    if not meeting:
        print(f"next         python {PACKAGE}/main.py --world_size {args.world_size}")


def meet(job):
    """Try a TCP connection to each other rank, then measure the round trip of an RPC to each.

    TCP comes first because its error names the two ranks between which there is no connection.
    """
    if job.rank == 0 or not job.spawned:
        explain(job.args, job.devices)
    peers = [rank for rank in range(job.world_size) if rank != job.rank]
    broken = _connect_to_each(job, peers)
    job.wait_for_all()  # every rank has tried all others
    if broken:
        raise UserError("; ".join(broken))
    job.wait_for_all()  # not reached by a rank that has raised, so the job ends before init_rpc can hang
    rpc.init_rpc(job.workers[job.rank], rank=job.rank, world_size=job.world_size, rpc_backend_options=job.rpc_options())
    for rank in peers:
        times = []
        for _ in range(TRIES):
            started = time.perf_counter()
            rpc.rpc_sync(job.workers[rank], torch.add, args=(torch.ones(4), 1))
            times.append(time.perf_counter() - started)
        milliseconds = statistics.median(times) * 1000
        print(f"round trip   {job.names[job.rank]} to {job.names[rank]}: {milliseconds:.2f} ms", flush=True)
    job.wait_for_all()
    rpc.shutdown()


def _connect_to_each(job, peers):
    """Return one line, with the reason, for each peer to which a TCP connection failed."""
    _, own = interface_towards(job.host)
    listener = socket.create_server((own, 0))
    store = job.store("check")
    broken = []
    threading.Thread(target=lambda: [listener.accept()[0].close() for _ in peers], daemon=True).start()
    store.set(str(job.rank), "{}:{}".format(*listener.getsockname()))
    for rank in peers:
        host, _, port = store.get(str(rank)).decode().partition(":")
        try:
            socket.create_connection((host, int(port)), SECONDS_TO_CONNECT).close()
        except OSError as error:
            broken.append(f"cannot reach {job.names[rank]}: {host}: {error}")
    return broken


def _resolve(host):
    try:
        return socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError:
        return "nothing"


def _holder_of(port):
    """Return a description of the process that listens on this TCP port; "" if there is none, or it cannot be seen."""
    try:
        sockets = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS, without root
        return ""
    for each in sockets:
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
            return f"process {each.pid} ({psutil.Process(each.pid).name()})" if each.pid else "another user's process"
    return ""
