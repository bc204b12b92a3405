"""Ranks on two hosts: every package works with the documented flags only, and the job ends if the link is cut."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from helpers import ROOT
from jobs import JOBS, session_members
from two_hosts import ADDRESSES, DEVICES, TwoHosts, why_not

FEW_EPISODES = ["--max_episodes", "8", "--eval_episodes", "1"]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class RanksOnTwoHosts:
    """The ranks of one job: rank 0 on host 0, the others alternately on host 1 and host 0."""

    def __init__(self, hosts, package, flags):
        self.processes, self.outputs = [], []
        for rank in range(len(JOBS[package]["names"])):
            command = [sys.executable, str(ROOT / package / "main.py"), *JOBS[package]["size"], *flags]
            command += ["--rank", str(rank), "--master_addr", ADDRESSES[0]]
            output = tempfile.TemporaryFile("w+")
            self.outputs.append(output)
            self.processes.append(
                subprocess.Popen(hosts.on(rank % 2, command), stdout=output, stderr=output, start_new_session=True)
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            for pid in session_members(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait()

    def text(self):
        parts = []
        for output in self.outputs:
            output.seek(0)
            parts.append(output.read())
        return "\n".join(parts)

    def wait(self, seconds):
        deadline = time.monotonic() + seconds
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]


@pytest.mark.slow
def test_works_across_two_hosts():
    package = "ddp_rpc"  # it uses RPC and a process group
    with TwoHosts() as hosts, RanksOnTwoHosts(hosts, package, JOBS[package]["short"]) as ranks:
        statuses = ranks.wait(120)
        assert set(statuses) == {0}, ranks.text()
        assert f"Listening on {ADDRESSES[0]} ({DEVICES[0]})." in ranks.text(), ranks.text()
        assert f"Listening on {ADDRESSES[1]} ({DEVICES[1]})." in ranks.text(), ranks.text()
        assert re.search(JOBS[package]["done"], ranks.text())


@pytest.mark.slow
def test_a_cut_link_ends_the_job():
    package = "ddp_rpc"  # it uses RPC and a process group
    with TwoHosts() as hosts, RanksOnTwoHosts(hosts, package, JOBS[package]["long"]) as ranks:
        deadline = time.monotonic() + 90
        while not re.search(JOBS[package]["training"], ranks.text()):
            assert time.monotonic() < deadline, ranks.text()
            time.sleep(0.1)
        hosts.cut()
        statuses = ranks.wait(15)
        assert set(statuses) == {1}, ranks.text()
        for rank, name in enumerate(JOBS[package]["names"]):
            assert re.search(rf"rank {rank} \({name}\): lost rank \d", ranks.text()), ranks.text()


@pytest.mark.slow
def test_a_slow_link_only_slows():
    with TwoHosts(delay_ms=5) as hosts, RanksOnTwoHosts(hosts, "rl_rpc", FEW_EPISODES) as ranks:
        assert set(ranks.wait(200)) == {0}, ranks.text()
