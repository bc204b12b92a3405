"""Where the processes of a job listen: on one interface only, and never on a fixed port.

Runs in every rank before RPC starts; called from job.py and check.py.
"""

import ipaddress
import os
import socket

import psutil
import torch.distributed as dist


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
