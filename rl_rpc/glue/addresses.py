"""Where the processes of a job listen: on one interface only, and never on a fixed port.  (The same file in all four.)

Runs in every rank before RPC starts; called from job.py and machine_check.py.
"""

import fcntl
import ipaddress
import os
import socket
import struct

import torch.distributed as dist


def listen_only_towards(host, port, say):
    """Let this process listen only on the interface that reaches `host`; return host's (IPv4 address, port).

    Raises OSError, with one line for the user, where there is no way to it.

    TensorPipe and Gloo would listen where this machine's *name* resolves to: a public address, or a wrong one.
    """
    try:
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        name, own = interface_towards(address)
    except OSError as error:
        raise OSError(f"--master_addr {host}: {error.strerror or error}") from None
    for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ[variable] = os.environ.get(variable, name)
    if say and not ipaddress.ip_address(address).is_loopback:
        print(
            f"Listening on {own} ({os.environ['TP_SOCKET_IFNAME']}). RPC runs whatever a peer sends, unencrypted: "
            "use it on a trusted network only.",
            flush=True,
        )
    return address, port


def interface_towards(address):
    """Return (interface name, own IPv4 address) of the route from this machine to `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it only looks up the route
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:  # SIOCGIFADDR
                reply = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(reply[20:24]) == own or (own.startswith("127.") and name == "lo"):
                return name, own
    raise OSError(f"no network interface has the address {own}, from which {address} is reached")


def hold_store(address):
    """Rank 0 in a terminal: hold the store on the given address, and on no other (torch's own would take all).

    Raises OSError, with one line for the user, where the port is taken or the address is not this machine's.
    """
    try:
        listener = socket.create_server(address, backlog=1024)
    except OSError as error:
        hint = "" if ipaddress.ip_address(address[0]).is_loopback else ", or --master_addr of this machine"
        where = f"{address[0]} port {address[1]}"
        raise OSError(f"cannot listen on {where}: {error.strerror} (choose another --master_port{hint})") from None
    return dist.TCPStore(*address, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False)
