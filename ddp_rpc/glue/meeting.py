"""How a rank joins a job: it finds the store, compares its flags with the job's, and waits until all ranks have joined.

Runs in every rank, called from job.py.  If a rank cannot join, only that rank ends, because the others do not
depend on it yet.
"""

import ipaddress
import json
import os
import socket
import time
from datetime import timedelta

import psutil
import torch.distributed as dist

from glue import UserError
from glue.ending import PACKAGE, leave_now

# A rank that waits for others prints a line about it after so many seconds, and then again at this interval.
PRINT_AFTER_SECONDS, PRINT_EVERY_SECONDS = 3.0, 30.0


def define_job(store, args):
    """Write into the store the flags that must be the same in every rank.  One process of the job calls this."""
    store.set("job", json.dumps(_definition(args)))


def _definition(args):
    return {"package": PACKAGE} | {flag: vars(args)[flag] for flag in args.agree}


class Meeting:
    """The steps by which one rank joins the job.  job.Job.join calls the methods in the order of this file."""

    def __init__(self, rank, args, names, holder, spawned):
        """`names`: all ranks, and `holder`: the process that holds the store, as the user reads them."""
        self.rank, self.names, self.holder, self.spawned = rank, names, holder, spawned
        self.definition = _definition(args)
        self.deadline = time.monotonic() + args.join_timeout
        self.patience = f"--join_timeout {args.join_timeout:g} s"

    def find_address(self, host, port):
        """Return the (IPv4 address, port) where the ranks meet.  Try again while DNS does not resolve the name."""
        address = self._repeat(lambda: listen_only_towards(host, port, announce=not self.spawned), "the address")
        self.where = f"{address[0]} port {address[1]}"
        return address

    def wait_for_store(self, address):
        """Return when a process listens at the address."""
        no_answer = f"nothing answers at {self.where} (--master_addr, --master_port)"
        self._repeat(lambda: socket.create_connection(address, timeout=1).close(), self.holder, no_answer)

    def _repeat(self, call, awaited, why=None):
        """Repeat call() until it does not fail, and return its result.  Give up at the deadline.

        It has to be repeated because no event reports that another process has started.
        """
        print_at = time.monotonic() + PRINT_AFTER_SECONDS
        while True:
            try:
                return call()
            except (OSError, dist.DistStoreError) as error:
                if time.monotonic() > self.deadline:
                    self.give_up(1, f"{awaited} did not come within {self.patience}: {why or error}")
                if time.monotonic() > print_at:
                    print_at += PRINT_EVERY_SECONDS
                    self._print(f"waiting for {awaited}: {why or error}")
                time.sleep(0.1)

    def agree(self, store):
        """End this process if this rank and the job were started with different flags (those in args.agree)."""
        self._repeat(lambda: store.wait(["job"], timedelta(seconds=0.5)), self.names[0], "it has not defined the job")
        theirs = json.loads(store.get("job"))
        for key in self.definition | theirs:
            own_value, job_value = self.definition.get(key), theirs.get(key)
            if own_value != job_value:
                values = f"{key} {own_value}, and this job with {job_value}"
                self.give_up(2, f"refused, because it was started with {values}")

    def take_place(self, store, gpus):
        """Write this rank's hello (its host, process and number of GPUs) into the store.

        Ends this process if another one has joined with the same rank.
        """
        own = {"host": socket.gethostname(), "pid": os.getpid(), "gpus": gpus}
        stored = json.loads(store.compare_set(f"hello/{self.rank}", "", json.dumps(own)))
        if stored != own:
            where = f"process {stored['pid']} on {stored['host']}"
            self.give_up(2, f"refused, because this rank has joined already, as {where}")

    def wait_for_hellos(self, store):
        """Return (the hellos of all ranks, None), or (None, why) if they did not come within --join_timeout."""
        keys = [f"hello/{rank}" for rank in range(len(self.names))]
        seconds = PRINT_AFTER_SECONDS
        while True:
            left = self.deadline - time.monotonic()
            try:
                store.wait(keys, timedelta(seconds=max(0.1, min(seconds, left))))
                return [json.loads(store.get(key)) for key in keys], None
            except dist.DistStoreError:
                missing = ", ".join(name for name, key in zip(self.names, keys, strict=True) if not store.check([key]))
                if left <= seconds:
                    return None, f"{missing} did not come within {self.patience}"
                self._print(f"waiting for {missing} at {self.where}")
                seconds = PRINT_EVERY_SECONDS

    def give_up(self, status, why):
        """End this process.  The others need not be informed, because they do not depend on it yet."""
        leave_now(status, f"{self.names[self.rank]}: {why}")

    def _print(self, text):
        if not self.spawned:
            print(f"{self.names[self.rank]}: {text} ({self.patience})", flush=True)


# ---------------------------------------------------------------------------------------------- addresses


def listen_only_towards(host, port, announce):
    """Let this process listen only on the interface that leads to `host`; return (IPv4 address of `host`, port).

    Without this, TensorPipe and Gloo listen on the address to which this machine's *name* resolves, which may be public
    or wrong.  Raises OSError, with one line for the user, if `host` cannot be reached.
    """
    try:
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        name, own = interface_towards(address)
    except OSError as error:
        raise OSError(f"--master_addr {host}: {error.strerror or error}") from None
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)
    if announce and not ipaddress.ip_address(address).is_loopback:
        where = f"{own} ({os.environ['TP_SOCKET_IFNAME']})"
        print(f"Listening on {where}. RPC runs whatever a peer sends, unencrypted: trusted networks only.", flush=True)
    return address, port


def interface_towards(address):
    """Return (interface name, own IPv4 address) of the route from this machine to `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # for UDP this sends nothing; it only looks up the route
        own = probe.getsockname()[0]
    local = ipaddress.ip_address(own).is_loopback  # may be 127.0.1.1, although the interface has 127.0.0.1
    for name, addresses in psutil.net_if_addrs().items():
        of_interface = [each.address for each in addresses if each.family == socket.AF_INET]
        if own in of_interface or (local and any(each.startswith("127.") for each in of_interface)):
            return name, own
    raise OSError(f"no network interface has the address {own}, from which {address} is reached")


def hold_store(address):
    """Return a TCPStore that listens on this address only; torch by itself would let it listen on all interfaces.

    Raises UserError.
    """
    try:
        return store_on(socket.create_server(address, backlog=1024))
    except OSError as error:
        why = f"{error.strerror} (choose another --master_port, or a --master_addr of this machine)"
        raise UserError(f"cannot listen on {address[0]} port {address[1]}: {why}") from None


def store_on(listener):
    """Return a TCPStore that serves on this socket, which is listening already, and on no other."""
    address, descriptor = listener.getsockname(), listener.detach()
    return dist.TCPStore(*address, is_master=True, master_listen_fd=descriptor, wait_for_workers=False)
