"""How a rank reaches rank 0, and on which network interface it listens.

Rank 0 listens at --master_addr and --master_port. (If one process has started all ranks, they inherit a socket that
listens already. Under torchrun, whose own store listens at this port, rank 0 takes a free port and says in that store
which.) Every other rank connects there, and keeps this connection for as long as it lives.
"""

import contextlib
import json
import os
import socket
import time

import psutil
import torch.distributed as dist

from glue import PACKAGE, UserError

PRINT_AFTER_SECONDS, PRINT_EVERY_SECONDS = 3.0, 30.0  # when a rank that waits prints for whom
CONNECT_SECONDS = 5.0  # in which a machine accepts a connection
ANSWER_SECONDS = 60.0  # for rank 0 to answer when a rank has connected: perhaps it still imports torch, or is stopped
LOST_AFTER_SECONDS = 8  # the kernel ends a connection over which it has heard nothing for so long


class Waiting:
    """Prints now and then for whom a rank waits, and gives up after --join_timeout."""

    def __init__(self, me, timeout, quiet):
        """`me`: this rank's name. `quiet`: print nothing, because the ranks share a console."""
        self.me, self.timeout, self.quiet = me, timeout, quiet
        self.started = time.monotonic()
        self.print_at = self.started + PRINT_AFTER_SECONDS

    def still(self, awaited, why=""):
        """Call this again and again while waiting. Raises UserError after --join_timeout."""
        limit = f"--join_timeout {self.timeout:g} s"
        if time.monotonic() > self.started + self.timeout:
            raise UserError(f"{awaited} did not come within {limit}{why}")
        if time.monotonic() > self.print_at and not self.quiet:
            print(f"{self.me}: waiting for {awaited}{why} ({limit})")
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
    """Return a socket that listens for the other ranks. Raises UserError."""
    # In Kubernetes, the name of a pod may be known some seconds later.
    address = waiting.retry(f"the address of {args.master_addr}", lambda: socket.gethostbyname(args.master_addr))
    store = torchruns_store(address, args)
    listener = listen(address, 0 if store else args.master_port)
    if store:
        args.restarts = store.add("attempts", 1) - 1
        store.set("rank 0", json.dumps([socket.gethostname(), *listener.getsockname()]))
    return listener


def connect(hello, args, rank_0, waiting):
    """Connect to rank 0; return (the connection, the lines that come over it as a file, its answer to `hello`).

    It is tried until --join_timeout has passed. Raises UserError.
    """
    where = f"{args.master_addr} port {args.master_port}"

    def attempt():
        connection = socket.create_connection(_find_rank_0(args), timeout=CONNECT_SECONDS)
        connection.settimeout(min(ANSWER_SECONDS, args.join_timeout))
        lines = connection.makefile("rb")
        try:
            send(connection, **hello)
            if not (line := lines.readline(1 << 20)):  # perhaps it is a proxy, and rank 0 has not started yet
                raise ConnectionError("what listens there has closed the connection")
            answer = json.loads(line)
            if not answer.keys() & {"missing", "end"}:
                raise ValueError
        except (TimeoutError, ValueError, AttributeError, RecursionError):  # it is silent, or sends no JSON object
            raise UserError(f"what listens at {where} is not {rank_0} (choose another --master_port)") from None
        keep_alive(connection)
        return connection, lines, answer

    return waiting.retry(f"{rank_0} at {where}", attempt)


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


# ------------------------------------------------------------------------------------------------ sockets, addresses


def send(connection, **message):
    """Send a message: a JSON object on a line of its own."""
    with contextlib.suppress(OSError):  # who reads from this connection notices this, too
        connection.sendall(json.dumps(message).encode() + b"\n")


def read(lines, act):
    """Call act(message) for each message that comes over a connection, until it ends; return why it has ended."""
    try:
        for line in lines:
            act(json.loads(line))
    except (ConnectionError, ValueError):  # ValueError: the process has died in the middle of a line
        pass
    except OSError:  # of the kernel: see keep_alive
        return f"silent for {LOST_AFTER_SECONDS} s: its machine or the network is gone"
    return "its process has ended"


def keep_alive(connection):
    """Let the kernel end this connection when it has heard nothing from the other machine for 8 seconds.

    It asks the other machine's kernel, not the process. So a process that computes, or is stopped in a debugger, is not
    lost, as long as less than a socket's buffer is sent to it: a message has tens of bytes.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * LOST_AFTER_SECONDS}
    for option, value in seconds.items():
        if hasattr(socket, option):  # not all systems have all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


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


def listen_only_at(own):
    """Let RPC and Gloo listen only on the interface that has `own`, an address of this machine.

    Without this, they listen on the address to which this machine's *name* resolves, which may be public or wrong. A
    job on loopback stays there, whatever the environment says; otherwise both variables together name the interface.
    """
    on_loopback = own.startswith("127.")
    prefix = "127." if on_loopback else f"{own}."  # it may be 127.0.1.1, although the interface has 127.0.0.1
    interfaces = psutil.net_if_addrs().items()
    names = [name for name, addresses in interfaces if any(f"{each.address}.".startswith(prefix) for each in addresses)]
    variables = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    if on_loopback or not all(os.environ.get(variable) for variable in variables):
        os.environ.update(dict.fromkeys(variables, names[0]))
