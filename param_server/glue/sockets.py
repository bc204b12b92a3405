"""The sockets of a job: messages over a connection to rank 0, and on which network interface a rank listens."""

import contextlib
import json
import os
import socket

from glue import UserError

import psutil
import torch.distributed as dist

LOST_AFTER_SECONDS = 8  # the kernel ends a connection over which it has heard nothing for so long


def send(connection, **message):
    """Send a message: a JSON object on a line of its own."""
    with contextlib.suppress(OSError):  # who reads from this connection notices this, too
        connection.sendall(json.dumps(message).encode() + b"\n")


def read(lines, act):
    """Call act(message) for each message that comes over a connection, until it ends; return why it has ended."""
    while True:
        try:
            message = json.loads(lines.readline())
        except (ConnectionError, ValueError):  # ValueError: there is no further line, or only the beginning of one
            return "its process has ended"
        except OSError:  # of the kernel: see end_with_a_process
            return f"silent for {LOST_AFTER_SECONDS} s: its machine or the network is gone"
        act(message)


def end_with_a_process(connection):
    """Let the kernel end this connection when a process at one of its ends dies, or when its machine is gone.

    It is gone if its kernel has not answered for 8 seconds. The process need not answer. So one that computes, or is
    stopped in a debugger, is not lost, as long as less than a socket's buffer is sent to it: a message has tens of
    bytes.
    """
    close_in_children(connection)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * LOST_AFTER_SECONDS}
    for option, value in seconds.items():
        if hasattr(socket, option):  # not all systems have all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def close_in_children(sock):
    """Close a socket in forked children, such as workers of a DataLoader, which may live on when this process dies."""

    def close():
        with contextlib.suppress(OSError):  # it is closed already
            os.close(sock.detach())  # sock.close() would wait until the file that reads from it is closed

    os.register_at_fork(after_in_child=close)


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
