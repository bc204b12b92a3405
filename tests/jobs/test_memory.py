"""The memory of a rank does not grow with the number of its training steps."""

import os
import pathlib

import psutil
import pytest

from documented import assert_documented
from faults import kill_and_check
from jobs import RunningJob

# For each package: flags with which the tensors of a step are large, and what is printed when memory has settled, and
# some hundred steps later. A rank that kept one of these tensors of each step, such as a gradient or the sums of the
# bags, would grow by 200 MiB or more.
LARGE = {
    "param_server": (
        ["--dataset", "synthetic", "--batch_size", 8, "--epochs", 9, "--log_interval", 10],
        (r"batch [67]\d\b", r"batch 2[67]\d\b"),
    ),
    "ddp_rpc": (["--embedding_dim", 4096, "--epochs", 1000], (r"epoch +1/", r"epoch +3/")),
}
MOST_MIB = 100  # freed memory that malloc keeps, and messages under way: up to 46 MiB were seen


def memory_of(pid):
    """Return the MiB that a process does not share with a file. The pages of a fork's parent count, too."""
    memory = psutil.Process(pid).memory_info()
    return (memory.rss - memory.shared) / 2**20


def listens_at_a_unix_socket(pid):
    with open("/proc/net/unix") as file:
        lines = [line.split() for line in list(file)[1:]]
    listening = {f"socket:[{inode}]" for _, _, _, flags, _, _, inode, *_ in lines if int(flags, 16) & 0x10000}
    return any(os.readlink(each) in listening for each in pathlib.Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.parametrize(
    ("package", "mode", "transport", "victim"),
    [
        ("param_server", "remote", "shm", 2),
        ("param_server", "overlap", "uv", 0),
        ("ddp_rpc", "pipelined", "uv", 3),
    ],
)
def test_no_rank_grows_with_its_steps(package, mode, transport, victim):
    """Over shared memory, ranks find each other by Unix sockets. At the end a rank is killed; the others name it."""
    flags, (begin, end) = LARGE[package]
    with RunningJob(package, "spawned", [*flags, "--mode", mode, "--transport", transport]) as job:
        ranks = [job.pid_of(rank) for rank in range(len(job.names))]
        assert job.wait_for_text(begin, 60), job.text()
        assert [listens_at_a_unix_socket(pid) for pid in ranks] == [transport == "shm"] * len(ranks)
        before = [memory_of(pid) for pid in ranks]
        assert job.wait_for_text(end, 60), job.text()
        grown = [memory_of(pid) - old for pid, old in zip(ranks, before, strict=True)]
        assert max(grown) < MOST_MIB, grown
        assert job.errors() == ""
        kill_and_check(job, victim, ranks)
        if victim == 0:
            assert_documented(job.errors(), "killed by SIGKILL")
