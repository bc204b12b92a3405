"""A rank ends whatever its output streams do: a full disk, a pipe that nobody reads, or whose reader is gone."""

import os
import signal
import subprocess
import sys
import time

import pytest

from helpers import ROOT
from jobs import JOBS, free_port
from processes import children_of, command_of, ranks_of, session_members
from programs import start_main

LONG = [*JOBS["rl_rpc"]["size"], *JOBS["rl_rpc"]["long"], "--mode", "rollout"]


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def start(*flags, **streams):
    return start_main("rl_rpc", *LONG, *flags, cold=True, **streams)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, how",
    [
        ("spawned", "full disk"),
        ("spawned", "pipe that nobody reads"),
        ("terminals", "full disk"),
        ("terminals", "pipe without reader"),
    ],
)
@pytest.mark.draw(2)
def test_a_rank_that_cannot_write_its_last_line_ends(way, how, tmp_path):
    """Rank 1's stderr is such a stream (of a spawned job: that of all processes), and another rank is killed."""
    read, write = os.pipe()
    if how == "pipe that nobody reads":
        os.set_blocking(write, False)
        while True:
            try:
                os.write(write, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(write, True)
    stream = open("/dev/full", "w") if how == "full disk" else os.fdopen(write, "w")
    out = open(tmp_path / "out", "w+")
    if way == "spawned":
        processes = [start(stdout=out, stderr=stream)]
    else:
        place = ("--master_port", free_port(), "--rank")
        processes = [start(*place, rank, stdout=out, stderr=stream if rank == 1 else out) for rank in range(3)]
    stream.close()
    try:
        assert wait_until(lambda: "Episode 20" in (tmp_path / "out").read_text(), 60)
        if how == "pipe without reader":
            os.close(read)
        session = [pid for process in processes for pid in session_members(process.pid)]
        os.kill(ranks_of(processes[0].pid)[0] if way == "spawned" else processes[0].pid, signal.SIGKILL)
        assert wait_until(lambda: all(process.poll() is not None for process in processes), 15)
        assert 1 in [process.returncode for process in processes][way == "terminals" :]
        assert wait_until(lambda: not any(map(command_of, session)), 5)
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_no_rank_is_left_when_the_starting_process_is_killed_and_nobody_reads():
    """Here the reader of its output is gone, too. test_signals.py has the same with a reader."""
    read, write = os.pipe()
    process = start(stdout=write, stderr=write)
    os.close(write)
    try:
        with open(read) as output:
            while "Episode 20" not in output.readline():
                assert process.poll() is None
        everybody = process.members()
        assert len(ranks_of(process.pid)) == 3 and children_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert wait_until(lambda: not process.members(), 15), list(map(command_of, everybody))
    finally:
        process.kill()


@pytest.mark.parametrize("package, flags", [("rl_rpc", ["--log_interval", 1]), ("ddp_rpc", ["--batches", 5])])
@pytest.mark.draw(1)
def test_a_job_whose_output_nobody_reads_any_more_ends_quietly(package, flags):
    """As in `main.py | head -1`. Other commands end in this case by SIGPIPE. In ddp_rpc an RPC makes the rank print."""
    reader, writer = os.pipe()
    with start_main(package, *JOBS[package]["long"], *flags, cold=True, stdout=writer) as process:
        os.close(writer)
        assert os.read(reader, 1)
        os.close(reader)
        assert (process.wait(60), process.errors()) == (128 + signal.SIGPIPE, "")


def test_a_job_whose_output_nobody_has_ever_read_ends_quietly():
    """As in `main.py | true`. With --device auto, a line is printed before any rank starts."""
    reader, writer = os.pipe()
    os.close(reader)
    with start_main("rl_rpc", "--device", "auto", stdout=writer) as process:
        os.close(writer)
        assert (process.wait(60), process.errors()) == (128 + signal.SIGPIPE, "")


FULL = "cannot write to stdout: No space left on device"


@pytest.mark.parametrize(
    "package, redirection, flags, status, said",
    [
        ("rl_rpc", ">/dev/full", [], 1, FULL),
        ("ddp_rpc", ">/dev/full", [], 1, FULL),
        ("rl_rpc", ">/dev/full", ["--device", "auto"], 1, FULL),
        ("rl_rpc", ">&-", [], 0, ""),
        ("rl_rpc", ">&-", ["--rank", 0, "--join_timeout", 0.1], 1, "did not come within"),
    ],
)
@pytest.mark.draw(2)
def test_a_job_that_cannot_print_says_so_or_works_without(package, redirection, flags, status, said):
    """Python itself prints nothing if stdout is closed."""
    by = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable]
    place = ["--master_port", free_port()] if "--rank" in flags else []
    done = start_main(package, *JOBS[package]["short"], *flags, *place, by=by).result(60)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    assert all(said in line or "lost rank" in line for line in done.stderr.splitlines()), done.stderr
    assert bool(done.stderr) == bool(said)


def test_a_line_is_written_in_one_piece():
    """Ranks share a console, so a newline that is written by itself may come behind another rank's line."""
    reader, writer = os.pipe2(os.O_DIRECT)  # a read returns what one write has written
    command = [sys.executable, "-u", "-c", "from glue.ending import print_error; print_error('a line')"]
    subprocess.run(command, cwd=ROOT / "rl_rpc", stderr=writer, timeout=60, check=True)
    assert os.read(reader, 100) == b"rl_rpc: a line\n"
    os.close(reader)
    os.close(writer)
