"""How many cores a process may use, and the transport that follows from it."""

import os
import subprocess
import sys

import pytest

from helpers import ROOT, package_on_path

with package_on_path("rl_rpc"):
    from glue import host

OWN = "print(__import__('sys').path.insert(0, {folder!r}) or __import__('glue.host').host.usable_cores())"


def usable_cores_of(prefix):
    """Return what a process that is started by the command `prefix` says."""
    program = OWN.format(folder=str(ROOT / "rl_rpc"))
    return int(subprocess.run([*prefix, sys.executable, "-c", program], capture_output=True, text=True).stdout)


def test_usable_cores_are_those_on_which_the_process_may_run():
    first = min(os.sched_getaffinity(0))
    assert usable_cores_of(["taskset", "-c", str(first)]) == 1


CONTAINER = 'mount -t tmpfs none /sys/fs/cgroup && echo "{quota}" > /sys/fs/cgroup/cpu.max && exec "$@"'


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to show a process other files")
@pytest.mark.parametrize("quota, cores", [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_usable_cores_respect_the_quota_of_a_container(quota, cores):
    """The process sees what docker and Kubernetes show to a container."""
    everywhere = len(os.sched_getaffinity(0))
    assert everywhere > 1, "this machine has only one core: nothing is shown"
    found = usable_cores_of(["unshare", "--mount", "sh", "-c", CONTAINER.format(quota=quota), "sh"])
    assert found == (cores or everywhere)


@pytest.mark.parametrize("cores, ranks_here, transport", [(2, 2, "uv"), (4, 2, "shm"), (64, 33, "uv"), (1, 1, "uv")])
def test_auto_takes_shared_memory_only_with_two_cores_for_each_rank(cores, ranks_here, transport, monkeypatch):
    monkeypatch.setattr(host, "usable_cores", lambda: cores)
    assert host.best_transport(ranks_here) == transport


@pytest.mark.parametrize("setting, workers, threads", [("2,1", 1, 2), ("4", 2, 2), ("1", 2, 1), ("all", 1, 3)])
def test_threads_follow_omp_num_threads(setting, workers, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    monkeypatch.setattr(host, "usable_cores", lambda: 3)
    chosen = []
    monkeypatch.setattr(host.torch, "set_num_threads", chosen.append)
    host.share_cores(workers)
    assert chosen == [threads]
