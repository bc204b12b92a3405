"""How a rank finds the supervisor, and on which network interface it listens.

Runs in every rank. A rank finds the supervisor at --master_addr and --master_port, where rank 0 has started it.
(Spawned ranks get the address of the one in the process that has spawned them instead, and torchrun's ranks ask
torchrun's own store.) RPC and process groups meet in a store of their own, in the same process.
"""

import json
import os
import socket
import time

import psutil
import torch.distributed as dist

from glue import PACKAGE, UserError, checkpoint, say
from glue.ending import CONNECT_SECONDS, PRINT_AFTER_SECONDS, PRINT_EVERY_SECONDS
from glue.supervisor import Link, Supervisor

LOST_START = "lost the starting process"


class CannotJoin(Exception):
    """This rank cannot join the job, or the job cannot begin. Its text says why."""


class Rendezvous:
    """One rank's way into the job. Afterwards `supervisor` is the Supervisor, if it is in this process."""

    def __init__(self, rank, args, names):
        """`names`: all ranks, as the user reads them."""
        self.rank, self.args, self.me, self.spawned = rank, args, names[rank], args.rank is None
        # For whom this rank waits. Rank 0, which has the supervisor, waits until its name is known.
        self.holder = names[0] if rank else "the address"
        self.deadline = time.monotonic() + args.join_timeout
        self.print_at = time.monotonic() + PRINT_AFTER_SECONDS
        self.supervisor = None

    def join(self, gpus):
        """Join the job; return (a Link to the supervisor, the first state of the job). Raises CannotJoin.

        This is tried until --join_timeout has passed, because no event reports that another process has started.
        """
        while True:
            try:
                return self._try_to_join(gpus)
            except OSError as error:
                if self.spawned:  # it listens already, or is gone
                    raise CannotJoin(LOST_START) from None
                self.wait_for(self.holder, f": {error}")
                time.sleep(0.1)

    def wait_for(self, awaited, why):
        """Print now and then for whom this rank waits, and why. Raises CannotJoin after --join_timeout."""
        limit = f"--join_timeout {self.args.join_timeout:g} s"
        if time.monotonic() > self.deadline:
            raise CannotJoin(f"{awaited} did not come within {limit}{why}")
        if time.monotonic() > self.print_at and not self.spawned:
            say(f"{self.me}: waiting for {awaited}{why} ({limit})")
            self.print_at = time.monotonic() + PRINT_EVERY_SECONDS

    def _try_to_join(self, gpus):
        """Raises OSError if the supervisor does not answer yet."""
        link = Link(_connect(*self._find_supervisor()))
        where = "{} port {}".format(*link.connection.getpeername())
        about = {"host": socket.gethostname(), "pid": os.getpid(), "gpus": gpus}
        link.send({"join": self.rank, "must_match": self.args.must_match} | about)
        try:
            state = link.receive()
        except ConnectionError:  # perhaps it is a proxy in front of a rank 0 that has not started yet
            raise ConnectionError(f"what listens at {where} has closed the connection") from None
        except (TimeoutError, ValueError, RecursionError):  # it is silent, or sends no JSON
            state = None
        if not isinstance(state, dict) or not state.keys() >= {"missing", "job", "passed", "lost", "end"}:
            why = f"what listens at {where} is not {self.holder} (choose another --master_port)"
            raise CannotJoin(LOST_START if self.spawned else why)
        return link, state

    def _find_supervisor(self):
        """Return the supervisor's (host, port); in rank 0, start it if no process has spawned this one."""
        if self.supervisor:
            return self.supervisor.listener.getsockname()
        host, port = listen_only_towards(self.args.master_addr), self.args.master_port
        if self.args.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return self._find_by_store(host, port)
        if self.rank == 0 and not self.spawned:
            self.supervisor = supervise(self.args, host, port)
        return host, port

    def _find_by_store(self, host, port):
        """The same, if torchrun's own store listens there. It outlives an attempt."""
        store = dist.PrefixStore(PACKAGE, dist.TCPStore(host, port, is_master=False, wait_for_workers=False))
        if self.rank == 0:
            restarts = store.add("attempts", 1) - 1
            job_id = store.compare_set("job_id", "", checkpoint.new_job_id()).decode()
            self.supervisor = supervise(self.args, host, 0, restarts, job_id)
            store.set("supervisor", json.dumps(self.supervisor.listener.getsockname()))
        elif not store.check(["supervisor"]):
            raise ConnectionError("it has not started yet")
        return json.loads(store.get("supervisor"))  # perhaps that of an earlier attempt


def supervise(args, host, port, restarts=0, job_id=None):
    """Start the supervisor of a job. It listens on this address. Raises UserError."""
    listener, store = listen(host, port), hold_store(host)
    job = {"id": job_id or checkpoint.new_job_id(), "restarts": restarts, "store_port": store.port}
    supervisor = Supervisor(args.world_size, args.must_match, job, listener, spawned=args.rank is None)
    supervisor.store = store  # it serves as long as this object exists
    return supervisor


# ---------------------------------------------------------------------------------------------- addresses


def _connect(host, port):
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        if connection.getsockname() == connection.getpeername():
            # Nobody listens at this port yet, and the system has chosen it for this end of the connection too.
            # Without this option, it would keep the port from rank 0 for a minute after it is closed.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connection.close()
            raise ConnectionError
        return connection
    except OSError:
        raise ConnectionError(f"nothing answers at {host} port {port} (--master_addr, --master_port)") from None


def listen_only_towards(host):
    """Let this process listen only on the interface that leads to `host`; return the IPv4 address of `host`.

    Without this, TensorPipe and Gloo listen on the address to which this machine's *name* resolves, which may be public
    or wrong. Raises OSError, with one line for the user, if `host` cannot be reached.
    """
    try:
        address = socket.gethostbyname(host)
        name, _ = interface_towards(address)
    except OSError as error:
        raise OSError(f"--master_addr {host}: {error.strerror or error}") from None
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(variable, name)
    return address


def interface_towards(address):
    """Return (interface name, own IPv4 address) of the route from this machine to `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # for UDP this sends nothing; it only looks up the route
        own = probe.getsockname()[0]
    # A loopback address may be 127.0.1.1, although the interface has 127.0.0.1.
    prefix = "127." if own.startswith("127.") else f"{own}."
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and (each.address + ".").startswith(prefix) for each in addresses):
            return name, own
    raise OSError(f"no network interface has the address {own}, from which {address} is reached")


def listen(host, port):
    """Return a socket that listens on this address only. Raises UserError."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        why = f"{error.strerror} (choose another --master_port, or a --master_addr of this machine)"
        raise UserError(f"cannot listen on {host} port {port}: {why}") from None


def hold_store(host):
    """Return a TCPStore, for RPC and process groups, at a free port of this address.

    By itself, torch would let it listen on all interfaces.
    """
    listener = listen(host, 0)
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False)
