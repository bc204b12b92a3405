"""How many cores a process may use, and the transport that follows from it."""

import os
import subprocess
import sys

import pytest

from helpers import ROOT, package_on_path

with package_on_path("rl_rpc"):
    from glue import host

pytestmark = pytest.mark.quick


def test_usable_cores_are_those_on_which_the_process_may_run():
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        assert host.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, everywhere)


QUOTAS = """
import pathlib
import subprocess
from glue import host

subprocess.run(["mount", "-t", "tmpfs", "none", "/sys/fs/cgroup"], check=True)
for quota in ("100000 100000", "50000 100000", "max 100000"):
    pathlib.Path("/sys/fs/cgroup/cpu.max").write_text(quota)
    print(host.usable_cores())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to show a process other files")
def test_usable_cores_respect_the_quota_of_a_container():
    """The process sees what docker and Kubernetes show to a container."""
    everywhere = len(os.sched_getaffinity(0))
    if everywhere == 1:
        pytest.skip("this machine has only one core, which is also what a quota of one core gives")
    command = ["unshare", "--mount", sys.executable, "-c", QUOTAS]
    done = subprocess.run(command, cwd=ROOT / "rl_rpc", capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", str(everywhere)]


@pytest.mark.parametrize("cores, ranks_here, transport", [(2, 2, "uv"), (4, 2, "shm"), (64, 33, "uv"), (1, 1, "uv")])
def test_auto_takes_shared_memory_only_with_two_cores_for_each_rank(cores, ranks_here, transport, monkeypatch):
    monkeypatch.setattr(host, "usable_cores", lambda: cores)
    assert host.best_transport(ranks_here) == transport


@pytest.mark.parametrize(
    "environ, workers, chosen",
    [
        ({}, 1, [7]),
        ({}, 2, [3]),
        ({}, 9, [1]),
        ({"OMP_NUM_THREADS": "5"}, 2, []),  # which OpenMP has read
        ({"OMP_NUM_THREADS": "all"}, 2, []),  # which it has read, too, and which it complains of
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 2, [3]),  # which torchrun has set
    ],
)
def test_workers_share_the_cores_unless_omp_num_threads_is_set(environ, workers, chosen, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host, "usable_cores", lambda: 7)
    found = []
    monkeypatch.setattr(host.torch, "set_num_threads", found.append)
    host.share_cores(workers)
    assert found == chosen
