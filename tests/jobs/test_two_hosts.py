"""Ranks on two hosts: every package works with the documented flags only, and the job ends if the link is cut."""

import os
import re

import pytest

from jobs import JOBS, RunningJob
from two_hosts import ADDRESSES, DEVICES, TwoHosts, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
HERE = ["--master_addr", ADDRESSES[0]]


@pytest.mark.slow
def test_works_across_two_hosts():
    package = "ddp_rpc"  # it uses RPC and a process group
    with TwoHosts() as hosts, RunningJob(package, "terminals", [*JOBS[package]["short"], *HERE], hosts=hosts) as job:
        statuses = job.wait(120)
        assert set(statuses) == {0}, job.text()
        assert f"Listening on {ADDRESSES[0]} ({DEVICES[0]})." in job.text(), job.text()
        assert f"Listening on {ADDRESSES[1]} ({DEVICES[1]})." in job.text(), job.text()
        assert re.search(JOBS[package]["done"], job.text())


@pytest.mark.slow
def test_a_host_divides_its_cores_among_its_own_ranks(monkeypatch):
    """Of three ranks, one host has two and the other has one."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0))
    if cores == 1:
        pytest.skip("this machine has only one core, which cannot be divided")
    with TwoHosts() as hosts, RunningJob("rl_rpc", "terminals", ["--check", *HERE], hosts=hosts) as job:
        assert set(job.wait(120)) == {0}, job.text()
        shares = re.findall(r"(\d+) intra-op thread\(s\) in each of (\d)", job.text())
        assert sorted(shares) == sorted([(str(cores // 2), "2")] * 2 + [(str(cores), "1")]), job.text()


@pytest.mark.slow
def test_a_cut_link_ends_the_job():
    package = "ddp_rpc"  # it uses RPC and a process group
    with TwoHosts() as hosts, RunningJob(package, "terminals", [*JOBS[package]["long"], *HERE], hosts=hosts) as job:
        assert job.wait_for_text(JOBS[package]["training"], 90)
        hosts.cut()
        statuses = job.wait(15)
        assert set(statuses) == {1}, job.text()
        for rank, name in enumerate(JOBS[package]["names"]):
            assert re.search(rf"rank {rank} \({name}\): lost rank \d", job.text()), job.text()
