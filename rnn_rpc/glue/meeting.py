"""How a rank finds the others: where it listens, the store, what job this is, a place of its own, everybody's hello.

Runs in every rank, called from job.py.  A rank that cannot take part leaves alone: the others do not count on it yet.
"""

import ipaddress
import json
import os
import socket
import time
from datetime import timedelta

import psutil
import torch.distributed as dist

from glue.ending import PACKAGE, leave_now

SAY_AFTER_SECONDS, SAY_EVERY_SECONDS = 3.0, 30.0  # ranks that wait for others say so


def define_job(store, args):
    """Write into the store what all ranks must have in common.  Only the process that holds the store does this."""
    store.set("job", json.dumps(_definition(args)))


def _definition(args):
    return {"package": PACKAGE} | {flag: vars(args)[flag] for flag in args.agree}


class Meeting:
    """One rank on its way into the job."""

    def __init__(self, rank, args, names, holder, spawned):
        """`names` of all ranks, and `holder` of the store, as the user reads them."""
        self.rank, self.names, self.holder, self.spawned = rank, names, holder, spawned
        self.definition = _definition(args)
        self.deadline = time.monotonic() + args.join_timeout
        self.patience = f"--join_timeout {args.join_timeout:g} s"

    def find_address(self, host, port):
        """Return the (IPv4 address, port) where the ranks meet, as soon as DNS knows it."""
        address = self._try(lambda: listen_only_towards(host, port, say=not self.spawned), "the address")
        self.where = f"{address[0]} port {address[1]}"
        return address

    def wait_for_store(self, address):
        """Return when somebody listens at the address."""
        nobody = f"nothing answers at {self.where} (--master_addr, --master_port)"
        self._try(lambda: socket.create_connection(address, timeout=1).close(), self.holder, nobody)

    def _try(self, call, awaited, why=None):
        """Return call(), as soon as it does not fail: there is nothing to wait on, and nobody who could tell us."""
        say_at = time.monotonic() + SAY_AFTER_SECONDS
        while True:
            try:
                return call()
            except (OSError, dist.DistStoreError) as error:
                if time.monotonic() > self.deadline:
                    self.give_up(1, f"{awaited} did not come within {self.patience}: {why or error}")
                if time.monotonic() > say_at:
                    say_at += SAY_EVERY_SECONDS
                    self._say(f"waiting for {awaited}: {why or error}")
                time.sleep(0.1)

    def agree(self, store):
        """Refuse to take part in a job that was started differently."""
        self._try(lambda: store.wait(["job"], timedelta(seconds=0.5)), self.names[0], "it has not defined the job")
        theirs = json.loads(store.get("job"))
        for key in self.definition | theirs:
            here, there = self.definition.get(key), theirs.get(key)
            if here != there:
                self.give_up(2, f"refused, because it was started with {key} {here}, and this job with {there}")

    def take_place(self, store, gpus):
        """Say hello to the others, and how many GPUs this rank may use; refuse to take a place that is taken."""
        me = {"host": socket.gethostname(), "pid": os.getpid(), "gpus": gpus}
        there = json.loads(store.compare_set(f"hello/{self.rank}", "", json.dumps(me)))
        if there != me:
            self.give_up(2, f"refused, because it is there already, as process {there['pid']} on {there['host']}")

    def wait_for_hellos(self, store):
        """Return (all ranks' hellos, None), or (None, why) when --join_timeout is over."""
        keys = [f"hello/{rank}" for rank in range(len(self.names))]
        seconds = SAY_AFTER_SECONDS
        while True:
            left = self.deadline - time.monotonic()
            try:
                store.wait(keys, timedelta(seconds=max(0.1, min(seconds, left))))
                return [json.loads(store.get(key)) for key in keys], None
            except dist.DistStoreError:
                missing = ", ".join(name for name, key in zip(self.names, keys, strict=True) if not store.check([key]))
                if left <= seconds:
                    return None, f"{missing} did not come within {self.patience}"
                self._say(f"waiting for {missing} at {self.where}")
                seconds = SAY_EVERY_SECONDS

    def give_up(self, status, why):
        """End this process; the others do not count on it yet."""
        leave_now(status, f"{self.names[self.rank]}: {why}")

    def _say(self, text):
        if not self.spawned:
            print(f"{self.names[self.rank]}: {text} ({self.patience})", flush=True)


# ---------------------------------------------------------------------------------------------- addresses


def listen_only_towards(host, port, say):
    """Let this process listen only on the interface that reaches `host`; return host's (IPv4 address, port).

    Raises OSError, with one line for the user, where there is no way to it.  TensorPipe and Gloo would listen where
    this machine's *name* resolves to: a public address, or a wrong one.
    """
    try:
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        name, own = interface_towards(address)
    except OSError as error:
        raise OSError(f"--master_addr {host}: {error.strerror or error}") from None
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)
    if say and not ipaddress.ip_address(address).is_loopback:
        where = f"{own} ({os.environ['TP_SOCKET_IFNAME']})"
        print(f"Listening on {where}. RPC runs whatever a peer sends, unencrypted: trusted networks only.", flush=True)
    return address, port


def interface_towards(address):
    """Return (interface name, own IPv4 address) of the route from this machine to `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it only looks up the route
        own = probe.getsockname()[0]
    local = ipaddress.ip_address(own).is_loopback  # 127.0.1.1, say, where the interface has 127.0.0.1
    for name, addresses in psutil.net_if_addrs().items():
        there = [each.address for each in addresses if each.family == socket.AF_INET]
        if own in there or (local and any(each.startswith("127.") for each in there)):
            return name, own
    raise OSError(f"no network interface has the address {own}, from which {address} is reached")


def hold_store(address):
    """Return a TCPStore that serves on this address alone (torch's own would take all).  Raises OSError, one line."""
    try:
        return store_on(socket.create_server(address, backlog=1024))
    except OSError as error:
        why = f"{error.strerror} (choose another --master_port, or a --master_addr of this machine)"
        raise OSError(f"cannot listen on {address[0]} port {address[1]}: {why}") from None


def store_on(listener):
    """Return a TCPStore that serves on a socket which listens already: where it does, and nowhere else."""
    address, descriptor = listener.getsockname(), listener.detach()
    return dist.TCPStore(*address, is_master=True, master_listen_fd=descriptor, wait_for_workers=False)
