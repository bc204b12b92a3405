"""The memory of a rank does not grow with the number of its training steps."""

import psutil
import pytest

from jobs import RunningJob

# For each package: the modes, flags with which the tensors of a step are large, and what is printed when memory has
# settled, and some hundred steps later. A rank that kept one of these tensors of each step, such as a gradient or the
# sums of the bags, would grow by 200 MiB or more.
RUNS = {
    "param_server": (
        ("remote", "replica", "bounded", "sync", "overlap"),
        ["--dataset", "synthetic", "--batch_size", 8, "--epochs", 9, "--log_interval", 10],
        (r"batch 60\b", r"batch 260\b"),
    ),
    "ddp_rpc": (
        ("hogwild", "sync", "pipelined"),
        ["--embedding_dim", 4096, "--epochs", 1000],
        (r"epoch +1/", r"epoch +3/"),
    ),
}
MOST_MIB = 100  # freed memory that malloc keeps, and messages under way: up to 46 MiB were seen


def memory_of(pid):
    """Return the MiB that a process does not share with a file. The pages of a fork's parent count, too."""
    memory = psutil.Process(pid).memory_info()
    return (memory.rss - memory.shared) / 2**20


@pytest.mark.slow
@pytest.mark.parametrize(("package", "mode"), [(package, mode) for package in RUNS for mode in RUNS[package][0]])
@pytest.mark.draw(2)
def test_no_rank_grows_with_its_steps(package, mode):
    _, flags, (begin, end) = RUNS[package]
    with RunningJob(package, "spawned", [*flags, "--mode", mode], env={"PYTHONUNBUFFERED": "1"}) as job:
        ranks = [job.pid_of(rank) for rank in range(len(job.names))]
        assert job.wait_for_text(begin, 60), job.text()
        before = [memory_of(pid) for pid in ranks]
        assert job.wait_for_text(end, 60), job.text()
        grown = [memory_of(pid) - old for pid, old in zip(ranks, before, strict=True)]
    assert max(grown) < MOST_MIB, grown
