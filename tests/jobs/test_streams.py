"""A job ends whatever its output does: a pipe that nobody reads, or whose reader is gone."""

import os
import signal
import time

import pytest

from jobs import JOBS
from processes import command_of, ranks_of
from programs import Program


def fill(pipe):
    """Write into a pipe until it takes no more."""
    os.set_blocking(pipe, False)
    try:
        while True:
            os.write(pipe, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(pipe, True)


def test_a_pipe_that_nobody_reads_holds_up_no_end(tmp_path):
    """A rank is killed. The others cannot write its name, because stderr is full."""
    read, write = os.pipe()
    fill(write)
    flags = ["--world_size", 3, *JOBS["rl_rpc"]["long"]]
    with Program("rl_rpc/main.py", *flags, stderr=write, env={"PYTHONUNBUFFERED": "1"}) as job:
        assert job.wait_for_text("Episode 20"), job.text()
        ranks = ranks_of(job.pid, 3)
        os.kill(ranks[0], signal.SIGKILL)
        deadline = time.monotonic() + 15
        while any(map(command_of, ranks)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert job.wait(5) == 1 and not job.left_over()
    os.close(read)
    os.close(write)


@pytest.mark.quick
def test_a_job_whose_output_nobody_reads_any_more_ends_quietly():
    """As in `main.py | head -1`. Other commands end in this case by SIGPIPE. In ddp_rpc an RPC makes the rank print."""
    reader, writer = os.pipe()
    with Program("ddp_rpc/main.py", *JOBS["ddp_rpc"]["long"], "--batches", 5, stdout=writer) as process:
        os.close(writer)
        assert os.read(reader, 1)
        os.close(reader)
        assert (process.wait(60), process.errors()) == (128 + signal.SIGPIPE, "")
        assert not process.left_over()
