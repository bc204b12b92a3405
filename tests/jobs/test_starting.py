"""How jobs start in every package: quietly, on loopback; how ranks meet, and what --check prints."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import threading

import pytest
import torch

from documented import PAGE, assert_documented
from forks import run_in_forks
from helpers import assert_one_line_error
from jobs import JOBS, RunningJob, folder_of_traps, free_port, left_in
from processes import wait_until
from programs import ROOT, Program, Programs, run_main
from two_hosts import DEVICES, watched_host

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change what a process sees of this machine")

# ------------------------------------------------------------------------------------------------ a normal run is quiet


@contextlib.contextmanager
def a_users_machine(tmp_path):
    """Yield keywords for Program; afterwards, check that the jobs have left nothing, and listened on loopback only.

    If possible, they run on a host whose name resolves to another address. The environment names another interface. The
    working directory has files with the names of the modules that a job imports.
    """
    temporary = tempfile.mkdtemp(
        prefix="a name that is too long for the path of a Unix socket, as some users have one "
    )
    shared = set(os.listdir("/dev/shm"))
    elsewhere = {"TP_SOCKET_IFNAME": DEVICES[0], "GLOO_SOCKET_IFNAME": DEVICES[0]}
    with folder_of_traps(tmp_path / "users") as users_folder, watched_host(may_poll=True) as by:
        yield {"by": by, "env": {"TMPDIR": temporary} | elsewhere, "cwd": users_folder}
    assert left_in(temporary) == []
    shutil.rmtree(temporary)
    new = {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith(("torch_", "sem."))}
    # A program that another test runs at this moment may have files there. They go away when it ends.
    wait_until(lambda: not new & set(os.listdir("/dev/shm")), 60)


def assert_quiet(programs):
    """Wait for the end of these programs, in which nothing goes wrong."""
    assert set(programs.wait()) == {0}, programs.text()
    assert programs.errors() == "" and not re.search(r"(?i)warning|deprecat", programs.text()), programs.text()
    assert not programs.left_over(2)


@pytest.mark.quick
def test_jobs_side_by_side_are_quiet_listen_on_loopback_only_and_leave_nothing(tmp_path):
    """One with RPC, and one with a process group, too, whose tutorial uses fixed ports. It has eight ranks."""
    flags = ["--summary_json", tmp_path / "s.json"]
    with (
        a_users_machine(tmp_path) as how,
        RunningJob("rl_rpc", "spawned", [*JOBS["rl_rpc"]["short"], *flags], **how) as one,
        RunningJob("ddp_rpc", "spawned", [*JOBS["ddp_rpc"]["short"], "--world_size", 8], **how) as other,
    ):
        assert_quiet(one)
        assert_quiet(other)
    assert sorted(os.listdir(tmp_path)) == ["s.json", "users"]


ANOTHER_PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
sys.argv[0] = {folder!r} + "/main.py"
import main
if __name__ == "__main__":
    main.launch.launch(main.run_worker, main.parse_args(), main.scenario)
"""


def test_a_run_in_terminals_is_quiet_listens_on_loopback_only_and_leaves_nothing(tmp_path):
    """Only the master is told to write a summary.

    A user's own program starts a trainer and the server. There, `__main__` has none of main.py's names, and RPC sends a
    function by the name of its module. So what is called in another rank must not stand in main.py.
    """
    program = tmp_path / "program.py"
    program.write_text(ANOTHER_PROGRAM.format(folder=str(ROOT / "ddp_rpc")))
    place = ["--world_size", 4, *JOBS["ddp_rpc"]["short"], "--master_port", free_port(), "--rank"]
    own = {0: [], 1: [], 2: ["--summary_json", tmp_path / "s.json"], 3: []}
    paths = [program, "ddp_rpc/main.py", "ddp_rpc/main.py", program]
    with (
        a_users_machine(tmp_path) as how,
        Programs(Program(paths[rank], *place, rank, *flags, **how) for rank, flags in own.items()) as ranks,
    ):
        assert_quiet(ranks)
    assert sorted(os.listdir(tmp_path)) == ["program.py", "s.json", "users"]


# --------------------------------------------------------------------------------------------------- meeting the others


def test_a_rank_that_does_not_fit_is_refused_and_the_job_goes_on(tmp_path):
    """Each rank has a terminal. Rank 0 has the flags of the job, which the trainer takes, and where it writes, too.

    At the end, SIGHUP ends one, as if its terminal were closed, and SIGTERM the other.
    """
    port, file = ["--master_port", free_port()], tmp_path / "c.pt"
    with contextlib.ExitStack() as stack:

        def start(*flags):
            program = Program("rnn_rpc/main.py", *port, "--rank", *flags, env={"PYTHONUNBUFFERED": "1"})
            return stack.enter_context(program)

        server = start(0, *JOBS["rnn_rpc"]["long"], "--seed", 3, "--checkpoint", file, "--join_timeout", 200)
        assert server.wait_for_text(r"waiting for rank 1 \(trainer\)"), server.text()
        refused = start(1, "--seed", 7), start(2), start(1, "--checkpoint", "/nonexist/c.pt")
        another, number, unwritable = (rank.result() for rank in refused)
        assert_one_line_error(unwritable, 2, "--checkpoint /nonexist/c.pt", "cannot write")
        trainer = start(1)
        assert trainer.wait_for_text("epoch +2"), trainer.text()
        assert torch.load(file, weights_only=True)["settings"]["seed"] == 3
        twin = start(1).result()
        for done in (another, number, twin):
            assert_one_line_error(done, 2, "refused")
        assert_documented(another.stderr, "it was started with seed 7")
        assert_documented(number.stderr, "this job has no rank 2")
        assert "this rank has joined already" in twin.stderr
        signals = {server: signal.SIGHUP, trainer: signal.SIGTERM}
        for rank, number in signals.items():
            rank.send_signal(number)
        for rank, number in signals.items():
            assert rank.wait(6) == -number, rank.text()
        assert not server.errors() and not trainer.errors()


@NEEDS_ROOT
def test_a_loopback_address_is_refused_if_ranks_are_on_other_hosts():
    """Here it is the same host, but with another name."""
    place = ["--world_size", 2, "--master_port", free_port(), "--rank"]
    elsewhere = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh", sys.executable]
    with (
        Program("rl_rpc/main.py", *place, 0) as agent,
        Program("rl_rpc/main.py", *place, 1, by=elsewhere) as observer,
    ):
        for done in (agent.result(60), observer.result(60)):
            assert_one_line_error(done, 1, "127.0.0.1 is a loopback address", "--master_addr")
        assert_documented(observer.errors(), "is a loopback address, and there are ranks on")


@NEEDS_ROOT
def test_a_rank_says_that_it_waits_for_rank_0_and_ends_at_join_timeout(tmp_path):
    """In a cluster, a pod's name is known some seconds after it has started, and a proxy may stand in front of it.

    Such a proxy accepts, and closes.
    """
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    see_hosts = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    with socket.create_server(("127.0.0.1", free_port())) as proxy:
        place = ["--master_addr", "no-such-host.invalid", "--master_port", proxy.getsockname()[1]]
        flags = ["--rank", 1, *place, "--join_timeout", 12]
        with Program("rl_rpc/main.py", *flags, by=[*see_hosts, sys.executable, "-u"]) as rank:
            assert rank.wait_for_text(r"waiting for rank 0"), rank.text()
            assert_documented(rank.output(), "Name or service not known")
            hosts.write_text("127.0.0.1 localhost no-such-host.invalid\n")
            proxy.settimeout(20)
            for _ in range(2):
                proxy.accept()[0].close()
            proxy.close()
            done = rank.result(60)
    assert_one_line_error(done, 1, "rank 0 at no-such-host.invalid")
    assert_documented(done.stderr, "did not come within --join_timeout 12 s: Connection refused")


def test_a_missing_rank_is_named_at_join_timeout_and_what_answers_at_the_port_is_recognised(tmp_path):
    """It sends back what it gets."""
    with socket.create_server(("127.0.0.1", free_port())) as server:

        def echo():
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(connection.recv(10_000))

        threading.Thread(target=echo, daemon=True).start()
        port, main = server.getsockname()[1], shlex.quote(str(ROOT / "rl_rpc/main.py"))
        alone = f"{main} --rank 0 --world_size 3 --master_port {free_port()} --join_timeout 1"
        led_astray = f"{main} --rank 1 --master_port {port} --join_timeout 60"
        done = run_in_forks(tmp_path, [alone, led_astray])
    assert_one_line_error(done[alone], 1, "--join_timeout 1 s")
    assert_documented(done[alone].stderr, "rank 1 (observer1), rank 2 (observer2) did not come")
    assert_one_line_error(done[led_astray], 1, f"localhost port {port} is not rank 0 of this job")
    assert len(done[led_astray].stderr.splitlines()) == 1


@pytest.mark.quick
def test_a_torch_without_rpc_is_named_in_one_line(tmp_path):
    """It imports, but torch.distributed.rpc is empty. Such a build is pretended here."""
    folder = tmp_path / "torch" / "distributed" / "rpc"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def is_available():\n    return False\n")
    (folder.parent / "__init__.py").touch()
    (folder.parent.parent / "__init__.py").write_text("__version__ = '9.9'\n")
    done = run_main("rnn_rpc", env={"PYTHONPATH": tmp_path})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith("rnn_rpc: this torch (9.9) was built without torch.distributed.rpc")


# -------------------------------------------------------------------------------------------------------------- --check


@pytest.mark.quick
def test_check_explains_the_machine_and_times_a_call_between_every_two_ranks():
    """It prints what docs/TROUBLESHOOTING.md shows, and the page's table has a row for each kind of line."""
    (example,) = re.findall(r"^    \$ python rl_rpc/main.py --world_size 2 --check\n((?: {4}.+\n)+)", PAGE, re.M)
    done = run_main("rl_rpc", "--world_size", 2, "--check")
    assert (done.returncode, done.stderr) == (0, "") and f"host         {socket.gethostname()}\n" in done.stdout

    def masked(text):  # without what differs from machine to machine, and in order
        text = re.sub(r"^(host +)\S+|^(GPUs +)\d+ \(.*?\)|^(torch +)[\w.+]+", r"\1\2\3", text, flags=re.M)
        return sorted(re.sub(r"\b\d+\b", "", text).splitlines())

    assert masked(done.stdout) == masked(textwrap.dedent(example))
    rows = PAGE.partition("| line | what points to a problem |\n")[2]
    table = re.findall(r"^\| ([\w ]+) \| [^|]+ \|$", rows, re.MULTILINE)
    assert table and set(table) <= {line[:13].strip() for line in done.stdout.splitlines()}
    trips = re.findall(r"round trip +rank (\d) \(\w+\) to rank (\d) \(\w+\): ([\d.]+) ms", done.stdout)
    assert {(a, b) for a, b, _ in trips} == {("0", "1"), ("1", "0")}
    assert all(0.02 < float(milliseconds) < 1000 for *_, milliseconds in trips)
