"""A job ends whatever its output does: a pipe that nobody reads, or whose reader is gone."""

import os
import signal

import pytest

from jobs import JOBS
from processes import ranks_of
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
        os.kill(ranks_of(job.pid, 3)[0], signal.SIGKILL)
        assert job.wait(15) == 1 and not job.left_over()
    os.close(read)
    os.close(write)


def test_output_that_nobody_reads_for_a_while_delays_the_job_and_breaks_nothing(few_digits):
    """For longer than --rpc_timeout, and than an error of a connection waits for the name of a lost rank (12 s)."""
    read, write = os.pipe()
    fill(write)
    flags = ("--data_dir", few_digits, "--log_interval", 1, "--max_batches", 20, "--rpc_timeout", 5)
    with Program("param_server/main.py", *flags, stdout=write) as job:
        os.close(write)
        with pytest.raises(AssertionError, match="not within"):
            job.wait(20)
        with open(read) as output:
            assert output.read().count("training batch") == 40
        assert job.wait() == 0 and job.errors() == ""


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
