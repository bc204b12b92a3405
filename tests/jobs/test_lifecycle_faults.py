"""If a rank is killed, or its host cut off, the job ends: however it was started, in any role, at any moment.

`python tools/soak_faults.py` runs hundreds of such cases. test_memory.py kills ranks of ddp_rpc and param_server, and
test_own_errors.py one of rl_rpc.
"""

import re

import pytest

from documented import assert_documented
from faults import run_case
from helpers import assert_one_line_error
from jobs import JOBS, RunningJob
from patches import main_with
from programs import run_script
from two_hosts import ADDRESSES, DEVICES, TwoHosts, why_not


@pytest.mark.parametrize(
    "package, way, rank, moment, seconds",
    [
        pytest.param("rnn_rpc", "terminals", 0, "training", 0.5, marks=pytest.mark.quick),
        ("ddp_rpc", "spawned", 0, "start", 1.1),
        ("rnn_rpc", "spawned", 1, "end", 1.4),
    ],
)
def test_a_death_ends_the_job(package, way, rank, moment, seconds):
    run_case(package, way, rank, moment, seconds)


def rank_1_dies(program, os, signal):
    run_rank = program.launch.run_rank

    def run_or_die(rank, *arguments):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        run_rank(rank, *arguments)

    program.launch.run_rank = run_or_die


def test_a_rank_that_dies_while_others_are_still_being_started_is_named(tmp_path):
    """Python's multiprocessing itself takes its exit code then."""
    done = run_script(main_with("rl_rpc", tmp_path, rank_1_dies), "--world_size", 8, timeout=60)
    assert_one_line_error(done, 1, "lost rank 1 (observer1): killed by SIGKILL")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_hosts_work_until_the_link_is_cut():
    """They need the documented flags only."""
    package = "rnn_rpc"
    flags = [*JOBS[package]["long"], "--master_addr", ADDRESSES[0]]
    with TwoHosts() as hosts, RunningJob(package, "terminals", flags, hosts=hosts) as job:
        assert job.wait_for_text(JOBS[package]["training"], 90), job.text()
        for address, device, process in zip(ADDRESSES, DEVICES, job.processes, strict=True):
            assert f"Listening on {address} ({device})." in process.output(), job.text()
        hosts.cut()
        assert job.wait(15) == [1, 1], job.text()
        for rank, process in enumerate(job.processes):
            name, other = job.names[rank], job.names[1 - rank]
            assert re.search(rf"rank {rank} \({name}\): lost rank {1 - rank} \({other}\)", process.errors()), job.text()
        assert_documented(job.errors(), "silent for 8 s")
