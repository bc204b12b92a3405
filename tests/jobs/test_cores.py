"""How many cores a process may use, and the transport that follows from it."""

import os

import pytest
import torch

from helpers import package_on_path

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


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize("quota, cores", [("100000 100000", 1), ("50000 100000", 1), ("max 100000", CORES)])
def test_usable_cores_respect_the_quota_of_a_container(quota, cores, monkeypatch):
    """As docker and Kubernetes show it to a container."""
    files = {"/sys/fs/cgroup/cpu.max": quota}
    monkeypatch.setattr(host.pathlib.Path, "read_text", lambda path: files[str(path)])
    assert host.usable_cores() == cores


@pytest.mark.parametrize(
    "environ, workers, chosen",
    [
        ({}, 1, CORES),
        ({}, CORES, 1),
        ({}, CORES + 1, 1),
        ({"OMP_NUM_THREADS": "5"}, CORES, 3),  # OpenMP has read it, so the number stays as it is
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 1, CORES),  # torchrun has set it
    ],
)
def test_workers_share_the_cores_unless_omp_num_threads_is_set(environ, workers, chosen, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        host.share_cores(workers)
        assert torch.get_num_threads() == chosen
    finally:
        torch.set_num_threads(before)
