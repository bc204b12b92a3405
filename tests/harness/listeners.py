"""The sockets that listen on one of the two hosts of two_hosts.py.

The host has a network namespace of its own, so all these sockets belong to the programs that a test runs on this host.
"""

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys


class Listeners:
    """A context manager that watches a host. Afterwards `tcp` has each (address, port), and `unix` each name.

    It looks often enough for sockets that listen only for a moment, such as Gloo's in init_rpc.
    """

    def __init__(self, hosts, host):
        self.command = hosts.on(host, [sys.executable, os.path.abspath(__file__)])

    def __enter__(self):
        self.watcher = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.watcher.stdout.readline() == "watching\n"
        return self

    def __exit__(self, *_):
        found, _ = self.watcher.communicate(timeout=10)  # closes its stdin, which ends it
        tcp, self.unix = json.loads(found)
        self.tcp = {(address, port) for address, port in tcp}


def tcp_listeners():
    for family, table in ((socket.AF_INET, "/proc/net/tcp"), (socket.AF_INET6, "/proc/net/tcp6")):
        with contextlib.suppress(OSError), open(table) as file:
            for line in list(file)[1:]:
                _, local, _, state = line.split()[:4]
                if state == "0A":
                    address, port = local.split(":")
                    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]  # in the machine's order
                    yield socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)


def unix_listeners():
    with open("/proc/net/unix") as file:
        for line in list(file)[1:]:
            fields = line.split(maxsplit=7)
            if int(fields[3], 16) & 0x10000:  # the kernel's flag for a socket that listens
                yield fields[7].strip() if len(fields) > 7 else "(no name)"


def watch():
    """Look until stdin is closed, then print what was found."""
    tcp, unix = set(), set()
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:  # not more often: each look takes milliseconds
        tcp.update(tcp_listeners())
        unix.update(unix_listeners())
    print(json.dumps([sorted(tcp), sorted(unix)]))


if __name__ == "__main__":
    watch()
