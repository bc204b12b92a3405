"""Measure the images per second of param_server with one server and with several, each rank on a host of its own.

    sudo python bench/servers.py

The hosts are network namespaces of this machine, joined by a bridge. The link of each host carries --rates megabits per
second in each direction. With one server (mode replica), all gradients and all weights go over that server's link. With
two (mode sharded), half of them go over the link of each. There are two trainers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

from common import ROOT, use_package

use_package("param_server")

from two_hosts import ip, why_not

BRIDGE = "servers"
TRAINERS = 2


class Hosts:
    """A context manager: hosts whose links carry `rate` megabits per second (0: as many as the machine can)."""

    def __init__(self, count, rate):
        self.names = [f"{BRIDGE}{number}" for number in range(count)]
        self.rate = rate

    def __enter__(self):
        self.remove()
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
            if self.rate:
                limit = ["root", "tbf", "rate", f"{self.rate}mbit", "burst", "256kb", "latency", "100ms"]
                subprocess.run(["tc", "qdisc", "add", "dev", name, *limit], check=True)  # to the host
                subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit], check=True)  # from it
        return self

    def __exit__(self, *_):
        self.remove()

    def address(self, number):
        return f"10.77.3.{number + 1}"

    def remove(self):
        for name in self.names:  # the end of the link in the namespace goes with it, and so the other end goes
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def images_per_second(hosts, servers, batches):
    """Run one job, each rank on its host; return what it reached."""
    mode = ["--mode", "sharded", "--num_servers", str(servers)] if servers > 1 else ["--mode", "replica"]
    with tempfile.TemporaryDirectory() as folder:
        summary = os.path.join(folder, "summary.json")
        job = ["--world_size", str(servers + TRAINERS), *mode, "--dataset", "synthetic", "--max_batches", str(batches)]
        job += ["--master_addr", hosts.address(0), "--transport", "tcp", "--summary_json", summary]
        ranks = []
        for rank in range(servers + TRAINERS):
            command = [sys.executable, str(ROOT / "param_server" / "main.py"), *job, "--rank", str(rank)]
            command = ["ip", "netns", "exec", hosts.names[rank], *command]
            ranks.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        assert not any([process.wait(600) for process in ranks])
        with open(summary) as file:
            return json.load(file)["images_per_second"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 100, 500, 0], metavar="MBIT", help="0: no limit")
    parser.add_argument("--batches", type=int, default=15, help="of each trainer")
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2], metavar="M")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    print("images per second, median (min - max)")
    heads = [f"{servers} server{'s' * (servers > 1)}" for servers in args.servers]
    print(f"{'Mbit/s':>8} " + " ".join(f"{head:>18}" for head in heads))
    for rate in args.rates:
        runs = {servers: [] for servers in args.servers}
        with Hosts(max(args.servers) + TRAINERS, rate) as hosts:
            for _ in range(args.repeats):
                for servers in args.servers:
                    runs[servers].append(images_per_second(hosts, servers, args.batches))
        cells = [f"{statistics.median(r):,.0f} ({min(r):,.0f} - {max(r):,.0f})" for r in runs.values()]
        print(f"{rate or 'no limit':>8} " + " ".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
