"""How many cores a process may use, and the transport that follows from it."""

import os
import pathlib
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


def test_usable_cores_respect_a_quota():
    """Needs root, to make a control group."""
    roots = {"/sys/fs/cgroup/cpu": "cpu.cfs_quota_us", "/sys/fs/cgroup": "cpu.max"}  # version 1, version 2
    for root, limit in roots.items():
        group = pathlib.Path(root, f"quota-of-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text("100000 100000" if limit == "cpu.max" else "100000")
                enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
                assert len(os.sched_getaffinity(0)) > 1, "this machine has only one core: nothing is shown"
                assert usable_cores_of(enter) == 1
                return
        finally:
            group.rmdir()
    pytest.skip("no control group with a CPU quota can be made here")


@pytest.mark.parametrize(
    "membership, files, quota",
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),  # version 2, in a container
        ("0::/pod/a\n", {"pod/cpu.max": "200000 100000", "pod/a/cpu.max": "max 100000"}, 2),  # the parent's limit
        (
            "3:cpuset:/\n2:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("2:cpu:/b\n", {"cpu/b/cpu.cfs_quota_us": "-1", "cpu/b/cpu.cfs_period_us": "100000"}, float("inf")),
        ("2:cpu:/on/the/host\n", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),  # docker
        ("", {}, float("inf")),
    ],
)
def test_quota_of_control_groups(membership, files, quota, tmp_path):
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert host.core_quota(tmp_path / "root", tmp_path / "membership") == quota


@pytest.mark.parametrize("cores, ranks_here, transport", [(2, 2, "uv"), (4, 2, "shm"), (64, 33, "uv"), (1, 1, "uv")])
def test_auto_takes_shared_memory_only_with_two_cores_for_each_rank(cores, ranks_here, transport, monkeypatch):
    monkeypatch.setattr(host, "usable_cores", lambda: cores)
    assert host.best_transport(ranks_here) == transport


@pytest.mark.parametrize("setting, workers, threads", [("2,1", 1, 2), ("4", 2, 2), ("1", 2, 1)])
def test_threads_follow_omp_num_threads(setting, workers, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    chosen = []
    monkeypatch.setattr(host.torch, "set_num_threads", chosen.append)
    host.share_cores(workers)
    assert chosen == [threads]
