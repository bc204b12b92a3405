"""How jobs start in every package: quietly, on loopback; how ranks meet, and what --check prints."""

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time

import psutil
import pytest

from helpers import assert_one_line_error
from jobs import JOBS, RunningJob, executed_traps, fill_with_traps, free_port, left_in
from programs import ROOT, Program, left_over, run_main

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to change what a process sees of this machine")

# ------------------------------------------------------------------------------------------------ a normal run is quiet


class SocketSampler(threading.Thread):
    """A thread that records, until it is stopped, on which addresses the processes of some programs listen."""

    LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})

    def __init__(self, programs):
        super().__init__(daemon=True)
        self.programs, self.seen, self.stopping = programs, set(), threading.Event()

    def run(self):
        while not self.stopping.wait(0.05):  # not more often, because it slows the job
            for pid in [pid for program in self.programs for pid in program.members()]:
                with contextlib.suppress(psutil.Error, OSError):  # it has ended
                    sockets = psutil.Process(pid).net_connections("tcp")
                    self.seen |= {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}

    def stop(self):
        self.stopping.set()
        self.join()


@contextlib.contextmanager
def a_users_machine(tmp_path):
    """Yield keywords for RunningJob; afterwards, check that the jobs have left nothing.

    If possible, the name of the host does not resolve, so that the name cannot be the reason for loopback; and the
    environment names other interfaces. The working directory has files with the names of the modules that a job
    imports.
    """
    temporary = tempfile.mkdtemp(
        prefix="a name that is too long for the path of a Unix socket, as some users have one "
    )
    shared = set(os.listdir("/dev/shm"))
    users_folder = tmp_path / "users"
    users_folder.mkdir()
    fill_with_traps(users_folder)
    elsewhere = {"TP_SOCKET_IFNAME": "another0", "GLOO_SOCKET_IFNAME": "another0"}
    yield {"other_hostname": True, "env": {"TMPDIR": temporary} | elsewhere, "cwd": users_folder}
    assert executed_traps(users_folder) == [] and left_in(temporary) == []
    shutil.rmtree(temporary)
    new = {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith(("torch_", "sem."))}
    # A program that another test runs at this moment may have files there. They go away when it ends.
    deadline = time.monotonic() + 60
    while new & set(os.listdir("/dev/shm")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not new & set(os.listdir("/dev/shm"))


def assert_quiet_on_loopback_only(programs):
    """Wait for the end of these programs, in which nothing goes wrong."""
    sampler = SocketSampler(programs)
    sampler.start()
    for program in programs:
        assert program.wait(120) == 0, program.text()
    sampler.stop()
    for program in programs:
        assert program.errors() == "" and not re.search(r"(?i)warning|deprecat", program.text()), program.text()
    assert not left_over(programs, 2)
    assert sampler.seen, "the sampler saw no listening socket at all: it does not work"
    assert sampler.seen <= SocketSampler.LOOPBACK, sampler.seen


@pytest.mark.quick
def test_jobs_side_by_side_are_quiet_listen_on_loopback_only_and_leave_nothing(tmp_path):
    """One with RPC, and one with a process group, too, whose tutorial uses fixed ports. It has eight ranks."""
    with a_users_machine(tmp_path) as how, contextlib.ExitStack() as stack:
        jobs = []
        for package, *flags in (("rl_rpc", "--summary_json", tmp_path / "s.json"), ("ddp_rpc", "--world_size", 8)):
            jobs.append(stack.enter_context(RunningJob(package, "spawned", [*JOBS[package]["short"], *flags], **how)))
        assert_quiet_on_loopback_only([program for job in jobs for program in job.processes])
    assert sorted(os.listdir(tmp_path)) == ["s.json", "users"]


ANOTHER_PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
sys.argv[0] = {folder!r} + "/main.py"
import main
if __name__ == "__main__":
    main.launch.launch(main.run_worker, main.parse_args(), main.worker_name)
"""


def test_a_run_in_terminals_is_quiet_listens_on_loopback_only_and_leaves_nothing(tmp_path):
    """Only the master is told to write a summary.

    A user's own program starts a trainer and the server. There, `__main__` has none of main.py's names, and RPC sends a
    function by the name of its module. So what is called in another rank must not stand in main.py.
    """
    program = tmp_path / "program.py"
    program.write_text(ANOTHER_PROGRAM.format(folder=str(ROOT / "ddp_rpc")))
    place = [*JOBS["ddp_rpc"]["size"], *JOBS["ddp_rpc"]["short"], "--master_port", free_port(), "--rank"]
    with a_users_machine(tmp_path) as how, contextlib.ExitStack() as stack:
        del how["other_hostname"]
        own = {0: [program], 1: ["ddp_rpc/main.py"], 2: ["ddp_rpc/main.py"], 3: [program]}
        summary = ["--summary_json", tmp_path / "s.json"]
        ranks = [
            stack.enter_context(Program(*words, *place, rank, *(summary if rank == 2 else ()), **how))
            for rank, words in own.items()
        ]
        assert_quiet_on_loopback_only(ranks)
    assert sorted(os.listdir(tmp_path)) == ["program.py", "s.json", "users"]


# --------------------------------------------------------------------------------------------------- meeting the others


def test_a_rank_that_does_not_fit_is_refused_and_the_job_goes_on():
    """Then SIGTERM ends the ranks, of which each has a terminal."""
    port = free_port()
    place = ["--world_size", 2, *JOBS["rl_rpc"]["long"], "--join_timeout", 200, "--master_port", port, "--rank"]
    env = {"PYTHONUNBUFFERED": "1"}
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(Program("rl_rpc/main.py", *place, 0, env=env))
        assert agent.wait_for_text(r"waiting for rank 1 \(observer1\)"), agent.text()
        other = run_main("rl_rpc", *place, 1, "--seed", 7)
        assert_one_line_error(other, 2, "refused, because it was started with seed 7, and this job with 1")
        second = run_main("rl_rpc", *place, 0)
        assert_one_line_error(second, 1, str(port), "--master_port")
        observer = stack.enter_context(Program("rl_rpc/main.py", *place, 1, env=env))
        assert agent.wait_for_text("Episode 20"), agent.text()
        for rank in (agent, observer):
            rank.send_signal(signal.SIGTERM)
        for rank in (agent, observer):
            assert rank.wait(6) in (143, -signal.SIGTERM), rank.text()
        refused = "refused a rank on .*, because it was started with seed 7, and this job with 1"
        assert re.fullmatch(rf"rl_rpc: rank 0 \(agent\): {refused}\n", agent.errors()) and not observer.errors()


def test_a_missing_rank_is_named_at_join_timeout():
    place = ["--rank", 0, "--master_port", free_port(), "--join_timeout", 0.5]
    done = run_main("rl_rpc", *place)
    assert_one_line_error(done, 1, "rank 1 (observer1) did not come within --join_timeout 0.5 s")


@NEEDS_ROOT
def test_ranks_say_that_they_wait_for_rank_0_and_end_at_join_timeout(tmp_path):
    """In a cluster, a pod's name is known some seconds after it has started, and a proxy may stand in front of it.

    Such a proxy accepts, and closes.
    """
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    see_hosts = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        place = ["--master_addr", "agent.svc", "--master_port", proxy.getsockname()[1], "--join_timeout", 12]
        with Program("rl_rpc/main.py", "--rank", 1, *place, by=[*see_hosts, sys.executable, "-u"]) as rank:
            assert rank.wait_for_text(r"waiting for rank 0 \(agent\): --master_addr agent.svc: "), rank.text()
            hosts.write_text("127.0.0.1 localhost agent.svc\n")
            proxy.settimeout(20)
            for _ in range(2):
                proxy.accept()[0].close()
            threading.Thread(target=close_connections, args=(proxy,), daemon=True).start()
            done = rank.result(60)
    assert_one_line_error(
        done, 1, "rank 0 (agent) did not come within --join_timeout 12 s", "has closed the connection"
    )


def close_connections(proxy):
    with contextlib.suppress(OSError):  # it is closed itself
        while True:
            proxy.accept()[0].close()


def test_what_answers_at_the_port_is_recognised():
    """Here it sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo():
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(connection.recv(10_000))

        threading.Thread(target=echo, daemon=True).start()
        port = server.getsockname()[1]
        done = run_main("rl_rpc", "--rank", 1, "--master_port", port, "--join_timeout", 60)
    assert_one_line_error(done, 1, f"rank 1 (observer1): what listens at 127.0.0.1 port {port} is not rank 0 (agent)")
    assert len(done.stderr.splitlines()) == 1


# -------------------------------------------------------------------------------------------------------------- --check


@pytest.mark.quick
def test_check_explains_the_machine_and_times_a_call_between_every_two_ranks():
    cores = len(os.sched_getaffinity(0))
    done = run_main("rl_rpc", "--check", "--world_size", 3, env={"OMP_NUM_THREADS": cores})
    assert (done.returncode, done.stderr) == (0, "")
    threads = f"{cores} intra-op thread(s) in each of 3 rank(s)"
    for word in (socket.gethostname(), "127.0.0.1 (lo)", threads, "GPUs", "ranks on cpu"):
        assert word in done.stdout, (word, done.stdout)
    trips = re.findall(r"round trip +rank (\d) \(\w+\) to rank (\d) \(\w+\): ([\d.]+) ms", done.stdout)
    assert {(a, b) for a, b, _ in trips} == {(a, b) for a in "012" for b in "012" if a != b}
    assert all(0.02 < float(milliseconds) < 1000 for *_, milliseconds in trips)
