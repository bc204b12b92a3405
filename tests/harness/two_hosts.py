"""Two hosts on one machine: network namespaces with a link between them, which can be cut.

Each host has its own loopback interface, its own address on the link, and its own name. As in container images, this
name resolves to an address at which the other host cannot reach it. There is no DNS.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings

NAMES = [f"rpc-host-{letter}-{os.getpid()}" for letter in "ab"]  # other tests run at the same time
DEVICES = [f"rpc-{letter}{os.getpid()}" for letter in "ab"]
NAMESPACES = ["--mount", "--net", "--uts", "--ipc", "--pid"]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LOOK_UNTIL_STDIN_IS_CLOSED = "while read -t 0.05; [ $? -gt 128 ]; do ss -Hlntx; done"


def why_not(*commands):
    """Return why this machine cannot make hosts with these commands, or "" if it can."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    if missing := [name for name in ("ip", "ss", *commands) if not shutil.which(name)]:
        return f"needs {', '.join(missing)} (.ci/run installs their Debian packages)"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"namespaces cannot be made: {tried.stderr.strip()}"


def ip(*words):
    subprocess.run(["ip", *words], check=True)


class TwoHosts:
    """A context manager: hosts 0 and 1."""

    def __enter__(self):
        for name in NAMES:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            etc = pathlib.Path("/etc/netns", name)  # `ip netns exec` mounts its files in /etc
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n127.0.1.1 {name}\n")
            (etc / "nsswitch.conf").write_text("hosts: files\n")
        ends = ["netns", NAMES[0], "type", "veth", "peer", "name", DEVICES[1], "netns", NAMES[1]]
        ip("link", "add", DEVICES[0], *ends)
        for name, address, device in zip(NAMES, ADDRESSES, DEVICES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
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


class Listeners:
    """A context manager that watches the sockets that listen on a host. All of them belong to a test's programs there.

    Afterwards `tcp` has each (address, port), and `unix` each name. It looks often enough for sockets that listen only
    for a moment, such as Gloo's in init_rpc.
    """

    def __init__(self, hosts, host):
        self.command = hosts.on(host, ["bash", "-c", LOOK_UNTIL_STDIN_IS_CLOSED])
        self.tcp, self.unix = set(), set()

    def __enter__(self):
        self.seen = tempfile.TemporaryFile("w+")
        self.watcher = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=self.seen)
        return self

    def __exit__(self, *_):
        self.watcher.communicate(timeout=10)
        self.seen.seek(0)
        for line in self.seen:
            kind, _, _, _, name, *_ = line.split()
            if kind == "tcp":
                address, _, port = name.rpartition(":")
                self.tcp.add((address.strip("[]"), int(port)))
            else:
                self.unix.add(name)


@contextlib.contextmanager
def watched_host(*stores, may_poll=False):
    """Yield the words that start Python on a host on which everything listens at 127.0.0.1, and nothing polls.

    Torch would listen by default at 127.0.1.1, to which the host's name resolves. `stores`: the ports of torch's
    stores, which listen everywhere. If this machine cannot make hosts, nothing is watched.
    """
    if why := why_not():
        warnings.warn(f"not checked where it listens, and whether it polls: {why}", stacklevel=3)
        yield [sys.executable]
        return
    with TwoHosts() as hosts, Listeners(hosts, 0) as listeners:
        yield hosts.on(0, [sys.executable])
    assert {address for address, port in listeners.tcp if port not in stores} == {"127.0.0.1"}
    assert may_poll or not listeners.unix  # only torch's polling transport, shm, has such sockets
