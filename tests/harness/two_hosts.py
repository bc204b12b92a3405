"""Two hosts on one machine: network namespaces with a link between them, which can be slow, and can be cut.

Needs root and the command ip (Debian: iproute2). Each host has its own loopback interface, its own address on the
link, and its own name. As in container images, this name resolves to an address at which the other host cannot reach
it. Its DNS knows no name. A slow link is a pair of TUN devices, and a process that forwards each packet after a delay.
(If the kernel has no netem, there is no simpler way.)
"""

import contextlib
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import sys
import time

WHOSE = sys.argv[2] if __name__ == "__main__" else os.getpid()  # for tests that run at the same time
NAMES, DEVICES = [f"rpc-host-a-{WHOSE}", f"rpc-host-b-{WHOSE}"], [f"rpc-a{WHOSE}", f"rpc-b{WHOSE}"]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
DNS = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.53", 53))
print("ready", flush=True)
while True:
    question, client = server.recvfrom(512)
    server.sendto(question[:2] + bytes([0x81, 0x83]) + question[4:], client)  # an answer: there is no such name
"""


def why_not():
    """Return why this machine cannot make two hosts, or "" if it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if not shutil.which("ip"):
        return "needs ip (Debian: iproute2)"
    tried = subprocess.run(["ip", "netns", "add", NAMES[0]], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", NAMES[0]], capture_output=True)
    return "" if tried.returncode == 0 else f"network namespaces cannot be made: {tried.stderr.strip()}"


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class TwoHosts:
    """A context manager: hosts 0 and 1, joined by a link that takes `delay_ms` milliseconds each way."""

    def __init__(self, delay_ms=0.0):
        self.delay_ms, self.helpers = delay_ms, []

    def __enter__(self):
        self._remove()
        for name in NAMES:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            os.makedirs(f"/etc/netns/{name}", exist_ok=True)
            with open(f"/etc/netns/{name}/hosts", "w") as hosts:  # `ip netns exec` mounts it as /etc/hosts
                hosts.write(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {name}\n")
            with open(f"/etc/netns/{name}/resolv.conf", "w") as resolver:
                resolver.write("nameserver 127.0.0.53\n")
            self._start("ready", "ip", "netns", "exec", name, sys.executable, "-c", DNS)
        if self.delay_ms:
            self._start("carrying", sys.executable, os.path.abspath(__file__), str(self.delay_ms), str(WHOSE))
        else:
            ends = ["netns", NAMES[0], "type", "veth", "peer", "name", DEVICES[1], "netns", NAMES[1]]
            ip("link", "add", DEVICES[0], *ends)
        for name, address, device in zip(NAMES, ADDRESSES, DEVICES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
        for helper in self.helpers:
            helper.kill()
            helper.wait()
        self._remove()

    def _start(self, says, *command):
        """Start a process that ends with this block. Return when it says that it works."""
        self.helpers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert self.helpers[-1].stdout.readline() == f"{says}\n"

    def _remove(self):
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def on(self, host, command):
        """Return the command that runs `command` on this host."""
        rename = ["unshare", "--uts", "sh", "-c", f'hostname {NAMES[host]}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", NAMES[host], *rename, *command]

    def cut(self):
        """Take the link down. Programs on the two hosts get no error from this."""
        ip("-n", NAMES[1], "link", "set", DEVICES[1], "down")


def open_tun(name, namespace):
    """Return the file descriptor of a new TUN device in `namespace`.

    A packet that is written to it is received in the namespace; a packet that the namespace sends can be read from it.
    """
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH", name.encode(), 0x0001 | 0x1000))  # TUNSETIFF: IFF_TUN, IFF_NO_PI
    ip("link", "set", name, "netns", namespace)
    return tun


def carry(delay):
    """Forward each packet from one TUN device to the other after `delay` seconds. Never returns."""
    ends = [open_tun(*end) for end in zip(DEVICES, NAMES, strict=True)]
    print("carrying", flush=True)
    waiting, count = [], 0  # a heap of (due, order, end, packet)
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], timeout)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(end, 65536)
                    count += 1
                    other = ends[1] if end == ends[0] else ends[0]
                    heapq.heappush(waiting, (time.monotonic() + delay, count, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the device is down, so the packet is lost, as on a cut link
                os.write(end, packet)


if __name__ == "__main__":
    carry(float(sys.argv[1]) / 1000)
