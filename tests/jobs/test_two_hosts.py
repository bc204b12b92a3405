"""Ranks on two hosts: they work with the documented flags only, and the job ends if the link is cut."""

import re

import pytest

from documented import assert_documented
from jobs import JOBS, RunningJob
from two_hosts import ADDRESSES, DEVICES, TwoHosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_two_hosts_work_until_the_link_is_cut():
    package = "rnn_rpc"
    flags = [*JOBS[package]["long"], "--master_addr", ADDRESSES[0]]
    with TwoHosts() as hosts, RunningJob(package, "terminals", flags, hosts=hosts) as job:
        assert job.wait_for_text(JOBS[package]["training"], 90), job.text()
        for address, device, process in zip(ADDRESSES, DEVICES, job.processes, strict=True):
            assert f"Listening on {address} ({device})." in process.output(), job.text()
        hosts.cut()
        assert job.wait(15) == [1, 1], job.text()
        for rank, process in enumerate(job.processes):
            name, other = job.names[rank], job.names[1 - rank]
            assert re.search(rf"rank {rank} \({name}\): lost rank {1 - rank} \({other}\)", process.errors()), job.text()
        assert_documented(job.errors(), "silent for 8 s")
