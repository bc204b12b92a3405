"""Where the ranks meet: how rank 0 is found, and how every rank reaches its Coordinator.

Rank 0 listens at --master_addr and --master_port. (If one process has started all ranks, it inherits a socket that
listens already. Under torchrun, whose own store listens at this port, rank 0 takes a free port and says in that store
which.) Every rank connects there, and keeps this connection for as long as it lives.
"""

import json
import os
import socket
import time

from glue import PACKAGE, UserError
from glue.sockets import end_with_a_process, listen, send

import torch.distributed as dist

PRINT_AFTER_SECONDS, PRINT_EVERY_SECONDS = 3.0, 30.0  # when a rank that waits prints for whom
CONNECT_SECONDS = 5.0  # in which a machine accepts a connection


class Waiting:
    """Prints now and then for whom a rank waits, and gives up after --join_timeout."""

    def __init__(self, job):
        self.job, self.timeout = job, job.args.join_timeout
        self.started = time.monotonic()
        self.print_at = self.started + PRINT_AFTER_SECONDS

    def still(self, awaited, why=""):
        """Call this again and again while waiting. Raises UserError after --join_timeout."""
        limit = f"--join_timeout {self.timeout:g} s"
        if time.monotonic() > self.started + self.timeout:
            raise UserError(f"{awaited} did not come within {limit}{why}")
        if time.monotonic() > self.print_at and not self.job.shares_console:
            print(f"{self.job.name}: waiting for {awaited}{why} ({limit})")
            self.print_at = time.monotonic() + PRINT_EVERY_SECONDS

    def retry(self, awaited, attempt):
        """Return attempt() as soon as it raises no OSError. No event reports that another process listens now."""
        while True:
            try:
                return attempt()
            except OSError as error:
                self.still(awaited, f": {error.strerror or error}")
                time.sleep(0.1)


def listen_as_rank_0(args, waiting):
    """Return a socket that listens for the ranks. Raises UserError."""
    # In Kubernetes, the name of a pod may be known some seconds later.
    address = waiting.retry(f"the address of {args.master_addr}", lambda: socket.gethostbyname(args.master_addr))
    store = torchruns_store(address, args)
    listener = listen(address, 0 if store else args.master_port)
    if store:
        args.restarts = store.add("attempts", 1) - 1
        store.set("rank 0", json.dumps([socket.gethostname(), *listener.getsockname()]))
    return listener


def connect(args, waiting):
    """Connect to the Coordinator; return (the connection, the lines that come over it as a file, its first answer).

    It is tried until --join_timeout has passed. Raises UserError.
    """
    where = f"{args.master_addr} port {args.master_port}"

    def attempt():
        connection = socket.create_connection(_find_rank_0(args), timeout=CONNECT_SECONDS)
        connection.settimeout(args.join_timeout)  # perhaps rank 0 still imports torch, or is stopped
        lines = connection.makefile("rb")
        try:
            send(connection, join=args.rank)
            if not (line := lines.readline(1 << 20)):  # perhaps it is a proxy, and rank 0 has not started yet
                raise ConnectionError("what listens there has closed the connection")
            answer = json.loads(line)
            if not answer.keys() & {"flags", "end"}:
                raise ValueError
        except (TimeoutError, ValueError, AttributeError, RecursionError):  # it is silent, or says something else
            why = f"what listens at {where} is not rank 0 of this job (choose another --master_port)"
            raise UserError(why) from None
        end_with_a_process(connection)
        return connection, lines, answer

    return waiting.retry(f"rank 0 at {where}", attempt)


def _find_rank_0(args):
    """Return (host, port) of rank 0. Raises OSError if that is not known yet."""
    address = socket.gethostbyname(args.master_addr)
    if not (store := torchruns_store(address, args)):
        return address, args.master_port
    if not store.check(["rank 0"]):
        raise ConnectionError("it has not started yet")
    its_host, address, port = json.loads(store.get("rank 0"))  # perhaps that of an earlier attempt
    if address.startswith("127.") and its_host != socket.gethostname():
        raise UserError(loopback_only(address, its_host))
    return address, port


def torchruns_store(address, args):
    """Return the store of torchrun's agent, if it listens at --master_port. It outlives an attempt."""
    if args.launcher != "torchrun" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return dist.PrefixStore(PACKAGE, dist.TCPStore(address, args.master_port, is_master=False, wait_for_workers=False))


def loopback_only(address, *hosts):
    why = f"{address} is a loopback address, and there are ranks on {', '.join(sorted(hosts))}"
    return f"{why}: use a --master_addr that all can reach (torchrun: --local-addr)"
