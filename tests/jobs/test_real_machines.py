"""What real machines do to a job: a DNS that is silent, a low limit of open files, names and texts of any letters."""

import os
import re
import sys
import time

import pytest
from torch.distributed.rpc import internal

from documented import assert_documented
from helpers import assert_one_line_error, noise, package_on_path, write_mnist
from jobs import JOBS, free_port
from patches import main_with
from programs import Program, run_main, run_script

with package_on_path("rl_rpc"):
    from glue import UserError, host

# --------------------------------------------------------------------------------------------------------- silent DNS

# $1 is "silent" or "none": a server that does not answer, or none at that address, so that a question fails at once.
WITH_DNS = """
ip link set lo up
echo "nameserver 127.0.0.53" > "$2" && mount --bind "$2" /etc/resolv.conf
if [ $1 = silent ]; then
    python3 -c 'import socket, time
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.53", 53))
open("{ready}", "w").close()
time.sleep(300)' &
    while [ ! -e "{ready}" ]; do sleep 0.05; done
fi
shift 2
"$@"
status=$?
kill $! 2>/dev/null
exit $status
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a network namespace")
def test_a_job_does_not_wait_for_a_silent_dns(tmp_path):
    """Without a limit of its own, glibc would wait 10 seconds for each client of a store, and so twice in this job."""
    took = {}
    for dns in ("none", "silent"):
        script = WITH_DNS.replace("{ready}", str(tmp_path / dns))
        by = ["unshare", "--net", "--mount", "bash", "-c", script, "sh", dns, tmp_path / "resolv.conf", sys.executable]
        started = time.monotonic()
        done = run_main("rl_rpc", "--world_size", 3, "--check", by=by)
        took[dns] = time.monotonic() - started
        assert (done.returncode, done.stderr) == (0, ""), done
        assert ("\nDNS " in done.stdout) == (dns == "silent"), done.stdout
    assert_documented(done.stdout, "silent: each process waits")
    assert took["silent"] < took["none"] + 8, took


# ---------------------------------------------------------------------------------------------------------- open files


def limited(limits):
    """Return the words that start a program with these limits, flags of the shell's ulimit."""
    return ["sh", "-c", f'ulimit {limits} && exec "$@"', "sh", sys.executable]


def test_a_job_that_needs_too_many_open_files_is_refused_in_one_line():
    """It is refused by whoever starts it, or by rank 0, before torch would end a process."""
    alone = run_main("rl_rpc", "--world_size", 12, by=limited("-n 40"))
    assert_one_line_error(alone, 1, "12 ranks over uv need", "rank 0 may have 40", "ulimit -n")
    assert_documented(alone.stderr, "open files in each, and rank")
    port = ["--master_port", free_port(), "--rank"]
    with (
        Program("rnn_rpc/main.py", *port, 0) as server,
        Program("rnn_rpc/main.py", *port, 1, by=limited("-n 100")) as few,
    ):
        for done in (server.result(60), few.result(60)):
            assert_one_line_error(done, 1, "rank 1 may have 100")
            assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_rank_raises_its_own_limit_of_open_files():
    done = run_main("rl_rpc", *JOBS["rl_rpc"]["shortest"], by=limited("-S -n 100"))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.quick
@pytest.mark.parametrize(
    "ranks, change, transport",
    [
        (30, {}, "shm"),
        (30, {"files": 1024}, "uv"),  # too many descriptors
        (30, {"memory": 20 << 30}, "uv"),  # too much memory: about 14 GB, of which half is to be left
        (65, {}, "uv"),  # less than two cores for each
        (2, {"files": 200}, "shm"),
        (20, {"files": 1024, "transport": "shm"}, "shm"),
        (30, {"files": 1024, "transport": "shm"}, None),
    ],
)
def test_auto_takes_shared_memory_only_where_it_fits(ranks, change, transport):
    """On a pretended machine with 128 cores."""
    rank = {"host": "a", "transport": "auto", "cores": 128, "memory": 256 << 30, "files": 20_000} | change
    if transport:
        assert host.transports_of([rank] * ranks) == [transport] * ranks
    else:
        with pytest.raises(UserError, match="ulimit -n"):
            host.transports_of([rank] * ranks)


# --------------------------------------------------------------------------------------------------- names and texts


def test_a_bad_file_is_named_as_it_is_called_by_whichever_rank_reads_it(tmp_path):
    """A trainer reads it, so the error comes to rank 0 by a call."""
    folder = write_mnist(tmp_path / "-数据 Müller \\xe4 100%s\nfolder", noise(20), noise(20))
    damaged = folder / "MNIST" / "raw" / "train-images-idx3-ubyte"
    damaged.write_bytes(damaged.read_bytes()[:500])
    done = run_main("param_server", f"--data_dir={folder}", env={"LANG": "C"})
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and re.match(r"param_server: rank 0 \(server1\): rank \d \(trainer\d\): ", line), line
    assert f"{str(damaged)!r}"[1:-1].replace("\\\\", "\\") in line, line


@pytest.mark.quick
def test_torch_itself_garbles_what_is_not_plain_text():
    with pytest.raises(ValueError) as garbled:
        internal._handle_exception(internal.RemoteException("On WorkerInfo(id=1): cannot read Müller", ValueError))
    assert_documented(str(garbled.value), "cannot read MÃ")


def has_an_escape(step):
    def select_action(self, ob_id, state):
        assert not ob_id, r"no \xzz, \u and ümlaut"

    step.Agent.select_action = select_action


def test_a_mistake_in_a_line_with_an_escape_has_its_traceback_and_its_line(tmp_path):
    """The call goes through two processes: the agent has called the observer, which calls the agent."""
    done = run_script(main_with("rl_rpc", tmp_path, has_an_escape))
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert 'assert not ob_id, r"no \\xzz, \\u and ümlaut"' in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("rl_rpc: rank 0 (agent): AssertionError: no \\xzz, \\u and ümlaut"), last


# -------------------------------------------------------------------------------------------- a rank 0 that begins late


def rank_0_begins_late(select):
    from glue.coordinator import Coordinator

    begin = Coordinator.__init__

    def begin_late(self, args, names, listener, shares_console):
        select.select([listener], [], [])  # until a rank has connected
        begin(self, args, names, listener, shares_console)

    Coordinator.__init__ = begin_late


def test_a_spawned_rank_waits_for_a_rank_0_that_begins_late(tmp_path):
    """It has connected to the socket that rank 0 inherits."""
    main = main_with("rl_rpc", tmp_path, rank_0_begins_late)
    done = run_script(main, *JOBS["rl_rpc"]["shortest"])
    assert (done.returncode, done.stderr) == (0, "")


# ----------------------------------------------------------------------------------------------------------- streams


def test_a_summary_goes_to_the_stream_that_is_named_behind_what_was_printed(tmp_path):
    """stdout is a file here, which the summary must not replace."""
    path = tmp_path / "out.txt"
    flags = [*JOBS["rl_rpc"]["shortest"], "--summary_json", "/dev/stdout"]
    with open(path, "w") as out, Program("rl_rpc/main.py", *flags, stdout=out) as job:
        assert job.wait() == 0, job.errors()
    text = path.read_text()
    assert re.fullmatch(r"This will run .*\nNot solved: .*\n\{\n.*\n\}\n", text, re.DOTALL), text
