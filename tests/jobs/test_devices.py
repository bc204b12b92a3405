"""Which cores and which device a rank uses. These tests need no GPU; test_cuda.py does."""

import os

import pytest
import torch

from helpers import assert_refused, package_on_path, parse_args

with package_on_path("rl_rpc"):
    from glue import host
    from glue.scenario import uses_device

pytestmark = pytest.mark.quick
CORES = len(os.sched_getaffinity(0))


def test_usable_cores_are_those_on_which_the_process_may_run():
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        assert host.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, everywhere)


@pytest.mark.parametrize("quota, cores", [("100000 100000", 1), ("50000 100000", 1), ("max 100000", CORES)])
def test_usable_cores_respect_the_quota_of_a_container(quota, cores, monkeypatch):
    """As docker and Kubernetes show it to a container."""
    files = {"/sys/fs/cgroup/cpu.max": quota}
    monkeypatch.setattr(host.pathlib.Path, "read_text", lambda path: files[str(path)])
    assert host.usable_cores() == cores


@pytest.mark.parametrize(
    "environ, workers, chosen",
    [
        ({}, CORES + 1, 1),
        ({"OMP_NUM_THREADS": "5"}, CORES, 3),  # OpenMP has read it, so the number stays as it is
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 1, CORES),  # torchrun has set it
    ],
)
def test_workers_share_the_cores_unless_omp_num_threads_is_set(environ, workers, chosen):
    del os.environ["OMP_NUM_THREADS"]
    os.environ |= environ
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        host.share_cores(workers)
        assert torch.get_num_threads() == chosen
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "places, devices",
    [
        ([("a", 2)] * 3, ["cuda:0", "cuda:1", "cuda:0"]),  # more ranks than GPUs: they share
        ([("a", 2), ("b", 2), ("a", 2), ("b", 2)], ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]),  # Slurm, cyclic
        ([("a", 2), ("a", 0), ("a", 2)], ["cuda:0", "cpu", "cuda:1"]),  # a rank that does not compute takes no GPU
    ],
)
def test_the_ranks_of_a_host_take_its_gpus_in_turn(places, devices):
    assert host.devices_of([{"host": name, "pid": 1, "gpus": gpus} for name, gpus in places]) == devices


@pytest.mark.parametrize(
    "package, flags, ranks",
    [
        ("rl_rpc", ["--world_size", "3"], [0]),
        ("rnn_rpc", ["--world_size", "3"], [0, 1, 2]),
        ("ddp_rpc", ["--world_size", "5", "--num_servers", "2"], [0, 1, 3, 4]),
        ("ddp_rpc", ["--table_device", "cpu"], [0, 1]),
        ("param_server", ["--mode", "remote"], [0]),
        ("param_server", ["--mode", "replica"], [0, 1, 2]),
    ],
)
def test_only_ranks_that_compute_use_a_gpu(package, flags, ranks, monkeypatch):
    with package_on_path(package):
        import main

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        args = main.parse_args([*flags, "--device", "cuda"])
        scenario = main.scenario(args)
        assert [rank for rank in range(args.world_size) if uses_device(rank, scenario)] == ranks


def test_num_gpus_says_which_device(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [parse_args("param_server", "--num_gpus", number).device for number in (0, 1)] == ["cpu", "cuda"]
    assert_refused("param_server", ["--num_gpus", 2], capsys, "--num_gpus 2: torch sees 1 CUDA GPU here")
