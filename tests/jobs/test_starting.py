"""How jobs start and end in every package (launch.py, job.py): ports, sockets, joining, restarts, --check."""

import contextlib
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from helpers import PACKAGES, ROOT, assert_one_line_error, package_on_path
from jobs import JOBS, RunningJob, executed_traps, fill_with_traps, free_port, left_in
from processes import children_of, forked, session_members
from programs import Program, run_main, run_script, start_main

LAST_RANK = {package: len(facts["names"]) - 1 for package, facts in JOBS.items()}


SLOW = {"marks": pytest.mark.slow}
RL_AND_SLOWLY_THE_OTHERS = [name if name == "rl_rpc" else pytest.param(name, **SLOW) for name in PACKAGES]


def short(package):
    return [*JOBS[package]["size"], *JOBS[package]["short"]]


# ------------------------------------------------------------------------------------------------ a normal run is quiet


@pytest.mark.slow
@pytest.mark.parametrize(
    "package, mode",
    [
        ("rl_rpc", "packed"),
        ("rl_rpc", "batched"),
        ("rl_rpc", "rollout"),
        ("rnn_rpc", "loss"),
        ("rnn_rpc", "overlap"),
        ("ddp_rpc", "sync"),
        ("ddp_rpc", "pipelined"),
        ("param_server", "replica"),
    ],
)
@pytest.mark.draw(4)
def test_no_mode_writes_to_stderr(package, mode):
    done = run_main(package, *short(package), "--mode", mode)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------------- sockets and ports


class SocketSampler(threading.Thread):
    """A thread that records, until it is stopped, on which addresses the processes of a job listen."""

    LOOPBACK = frozenset({"127.0.0.1", "::1", "::ffff:127.0.0.1"})

    def __init__(self, sessions):
        super().__init__(daemon=True)
        self.sessions, self.seen, self.stopping = sessions, set(), threading.Event()

    def run(self):
        while not self.stopping.wait(0.05):  # not more often, because it slows the job
            for pid in itertools.chain(*map(session_members, self.sessions)):
                with contextlib.suppress(psutil.Error, OSError):  # it has ended
                    sockets = psutil.Process(pid).net_connections("tcp")
                    self.seen |= {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}

    def stop(self):
        self.stopping.set()
        self.join()


def watch_sockets(package, way, tmp_path):
    """Run a job and check that it listens on loopback only.

    If possible, it runs on a host whose name does not resolve, so that the name cannot be the reason for loopback. Its
    working directory has files with the names of the modules that a job imports.
    """
    temporary = tempfile.mkdtemp()  # tmp_path's name may be too long for a socket
    shared = set(os.listdir("/dev/shm"))
    users_folder, results = tmp_path / "users", tmp_path / "results"
    users_folder.mkdir()
    results.mkdir()
    fill_with_traps(users_folder)
    flags = [*JOBS[package]["short"], "--summary_json", "../results/summary.json"]
    with RunningJob(
        package, way, flags, other_hostname=True, env={"TMPDIR": temporary}, cwd=users_folder, cold=True
    ) as job:
        sampler = SocketSampler([process.pid for process in job.processes])
        sampler.start()
        statuses = job.wait(120)
        sampler.stop()
        assert set(statuses) == {0}, job.text()
        assert job.errors() == ""
        assert not re.search(r"(?i)warning|deprecat", job.text()), job.text()
        assert not job.survivors(2)
    assert executed_traps(users_folder) == []
    assert left_in(temporary) == [] and os.listdir(results) == ["summary.json"]
    shutil.rmtree(temporary)
    new = {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith(("torch_", "sem."))}
    # A program that another test runs at this moment may have files there. They go away when it ends.
    deadline = time.monotonic() + 60
    while new & set(os.listdir("/dev/shm")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not new & set(os.listdir("/dev/shm"))
    assert sampler.seen, "the sampler saw no listening socket at all: it does not work"
    assert sampler.seen <= SocketSampler.LOOPBACK, sampler.seen


@pytest.mark.parametrize("package", RL_AND_SLOWLY_THE_OTHERS)
@pytest.mark.draw(1)
def test_a_spawned_run_is_quiet_listens_on_loopback_only_and_leaves_nothing(package, tmp_path):
    watch_sockets(package, "spawned", tmp_path)


def test_rpc_and_process_groups_use_the_interface_that_leads_to_rank_0():
    """Otherwise each uses the address to which the name of this machine resolves, which the tests cannot choose."""
    with package_on_path("rl_rpc"):
        from glue import rendezvous
    assert rendezvous.listen_only_towards("localhost") == "127.0.0.1"
    assert (os.environ["TP_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("lo", "lo")


@pytest.mark.slow
def test_a_run_in_terminals_is_quiet_listens_on_loopback_only_and_leaves_nothing(tmp_path):
    """With RPC and a process group."""
    watch_sockets("ddp_rpc", "terminals", tmp_path)


# ------------------------------------------------------------------------------------------- how the processes start


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}])
@pytest.mark.draw(1)
def test_torchrun_in_a_folder_with_files_named_like_ours(env, tmp_path):
    """The tests above do this for the other ways to start. With RPC and a process group.

    torchrun may have no store for its ranks. Then rank 0 listens at the address and port that torchrun gives to all.
    """
    fill_with_traps(tmp_path)
    with RunningJob("ddp_rpc", "torchrun", JOBS["ddp_rpc"]["short"], env=env, cwd=tmp_path) as job:
        assert job.wait(120) == [0], job.text()
        assert re.search(JOBS["ddp_rpc"]["done"], job.text()), job.text()
        assert executed_traps(tmp_path) == []


def test_all_ranks_are_forks_of_one_process_that_has_loaded_torch_and_the_package(tmp_path):
    """Python lists the modules that each process imports.  --checkpoint is used because it begins like --check."""
    flags = [*short("rl_rpc"), "--checkpoint", str(tmp_path / "checkpoint.pt")]
    with RunningJob("rl_rpc", "spawned", flags, env={"PYTHONPROFILEIMPORTTIME": "1"}, cwd=ROOT, cold=True) as job:
        assert job.wait(60) == [0], job.text()
        loaded = re.findall(r"^import time: .*\| +(torch|step|torch\._dynamo)$", job.errors(), re.M)
    # The starting process and the fork server import them; the three ranks do not.
    times = {name: loaded.count(name) for name in loaded}
    assert times == {"torch": 2, "step": 2, "torch._dynamo": 1}


@pytest.mark.slow
@pytest.mark.crowd
def test_jobs_side_by_side():
    """Two jobs of ddp_rpc, whose original tutorial uses fixed ports and so allows only one job, and another one."""
    packages = ("ddp_rpc", "ddp_rpc", "rl_rpc")
    jobs = [start_main(package, *short(package)) for package in packages]
    for package, job in zip(packages, jobs, strict=True):
        done = job.result(240)
        assert (done.returncode, done.stderr) == (0, ""), (package, done.stderr)


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_main("rl_rpc", "--world_size", 2, "--rank", 0, "--master_port", port)
    assert_one_line_error(done, 1, str(port), "--master_port")


@pytest.fixture
def listener():
    """Yield (its port, a function that lets it answer each connection by a function of the connection)."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_with(answer):
            def serve():
                with contextlib.suppress(OSError):  # closed
                    while True:
                        connection, _ = server.accept()
                        with connection, contextlib.suppress(OSError):
                            answer(connection)

            threading.Thread(target=serve, daemon=True).start()

        yield server.getsockname()[1], answer_with
        server.shutdown(socket.SHUT_RDWR)


WRONG = [b"1", b"[]", b"null", b'{"error": "who are you?"}', b'{"missing": []}', b"[" * 100_000, b"GET"]
ANSWERS = {answer[:20]: lambda connection, answer=answer: connection.sendall(answer + b"\n") for answer in WRONG} | {
    "echo": lambda connection: connection.sendall(connection.recv(10_000)),
    "silence": lambda connection: list(iter(lambda: connection.recv(10_000), b"")),  # reads all that comes
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_answers_is_checked_before_it_is_believed(answer, listener, monkeypatch):
    """A spawned rank knows who answers: the starting process, which may have been stopped."""
    port, answer_with = listener
    answer_with(ANSWERS[answer])
    with package_on_path("rl_rpc"):
        from glue import rendezvous, supervisor
    monkeypatch.setattr(supervisor, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "LOST_AFTER_SECONDS", 0.3)
    place = {"master_addr": "localhost", "master_port": port, "launcher": None, "must_match": {}, "join_timeout": 60}
    for rank, said in ((1, rf"port {port} is not rank 0 \(agent\)"), (None, "^lost the starting process$")):
        args = SimpleNamespace(rank=rank, **place)
        with pytest.raises(rendezvous.CannotJoin, match=said):
            rendezvous.Rendezvous(1, args, ["rank 0 (agent)", "rank 1 (observer1)"]).join(0)


def test_what_answers_at_the_port_is_recognised(listener):
    port, answer_with = listener
    answer_with(ANSWERS["echo"])
    done = run_main("rl_rpc", "--world_size", 2, "--rank", 1, "--master_port", port, "--join_timeout", 60)
    assert_one_line_error(done, 1, f"rank 1 (observer1): what listens at 127.0.0.1 port {port} is not rank 0 (agent)")
    assert len(done.stderr.splitlines()) == 1


def test_a_proxy_in_front_of_a_rank_0_that_has_not_come_yet_is_waited_for(listener):
    """It accepts, and closes."""
    port, answer_with = listener
    answer_with(lambda connection: None)
    done = run_main("rl_rpc", "--world_size", 2, "--rank", 1, "--master_port", port, "--join_timeout", 2)
    assert_one_line_error(done, 1, "rank 0 (agent) did not come within --join_timeout 2 s", "has closed the connection")


NARROW = """
ip link set lo up
echo 38040 38041 > /proc/sys/net/ipv4/ip_local_port_range
"$@" --rank 1 & first=$!
while ! [ -e waits ]; do sleep 0.1; done
echo 32768 60999 > /proc/sys/net/ipv4/ip_local_port_range
"$@" --rank 0 && wait $first
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a network of its own")
def test_a_rank_that_waits_does_not_take_itself_for_rank_0(tmp_path):
    """If nobody listens at a port from which connections are made, the system may connect a socket to itself.

    Here there are only two such ports, until rank 1 has waited for some time.
    """
    flags = ["--world_size", 2, *JOBS["rl_rpc"]["short"], "--master_port", 38040, "--join_timeout", 60]
    by = ["unshare", "--net", "sh", "-c", NARROW, "sh", sys.executable, "-u"]
    with Program("rl_rpc/main.py", *flags, by=by, cwd=tmp_path) as both:
        assert both.wait_for_text(r"waiting for rank 0 \(agent\)"), both.text()
        (tmp_path / "waits").touch()
        assert both.wait(60) == 0, both.text()


def test_every_rank_ends_whatever_goes_wrong_while_it_ends(listener):
    """What answers speaks as a supervisor does, and says that a rank is lost that does not exist."""
    port, answer_with = listener
    state = {"missing": [0], "job": {}, "passed": 0, "lost": [], "end": {"rank": 99, "why": "nonsense"}}
    answer_with(lambda connection: connection.sendall(json.dumps(state).encode() + b"\n"))
    done = run_main("rl_rpc", "--world_size", 2, "--rank", 1, "--master_port", port, timeout=15)
    assert done.returncode == 1, done


def test_a_rank_that_gets_no_more_memory_ends():
    """A limit such as `ulimit -v`. It cannot even start the thread that prints why it ends."""
    with RunningJob("rl_rpc", "terminals", [*JOBS["rl_rpc"]["long"], "--log_interval", "1"]) as job:
        assert job.wait_for_text("Episode 3", 60)
        observer = job.pid_of(2)
        in_use = psutil.Process(observer).memory_info().vms
        resource.prlimit(observer, resource.RLIMIT_AS, (in_use, resource.RLIM_INFINITY))
        os.kill(job.pid_of(1), signal.SIGKILL)
        assert job.wait(15) == [1, -signal.SIGKILL, 1], job.text()


@pytest.mark.parametrize(("room", "stay"), [(20, False), (400, True)])  # RPC needs about 150
def test_many_connections_of_a_stranger_do_not_keep_a_rank_out(room, stay):
    """Rank 0 runs out of open files until the stranger closes them. If they stay open, it keeps only 100 of them."""
    with RunningJob("rl_rpc", "terminals", JOBS["rl_rpc"]["short"]) as job, contextlib.ExitStack() as connections:
        agent = job.pid_of(0)
        os.kill(job.pid_of(1), signal.SIGSTOP)
        wait_for_listener(int(job.port))
        plain = resource.prlimit(agent, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{agent}/fd"))
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (used + room, plain[1]))
        for _ in range(2 * room):
            connections.enter_context(socket.create_connection(("127.0.0.1", int(job.port))))
        if not stay:
            deadline = time.monotonic() + 10
            while len(os.listdir(f"/proc/{agent}/fd")) < used + room:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            connections.close()
            resource.prlimit(agent, resource.RLIMIT_NOFILE, plain)
        os.kill(job.pid_of(1), signal.SIGCONT)
        assert job.wait(60) == [0, 0, 0], job.text()


# --------------------------------------------------------------------------------------------------- meeting the others


@pytest.mark.slow
def test_ranks_say_that_they_wait_for_a_missing_one_and_name_it_at_join_timeout():
    port = free_port()
    flags = [*short("rl_rpc"), "--join_timeout", "6", "--master_port", port]
    ranks = [start_main("rl_rpc", *flags, "--rank", rank) for rank in (0, 1)]
    for rank in ranks:
        done = rank.result(60)
        assert done.returncode == 1
        assert "rank 2 (observer2) did not come within --join_timeout 6 s" in done.stderr, done.stderr
        where = rf"rank 2 \(observer2\) at 127.0.0.1 port {port} \(--join_timeout 6 s\)"
        assert re.search(rf"waiting for (rank .*, )?{where}", done.stdout), done.stdout


@pytest.mark.slow
def test_ranks_say_that_they_wait_for_rank_0_and_end_at_join_timeout():
    port = free_port()
    done = run_main("rl_rpc", "--world_size", 2, "--rank", 1, "--master_port", port, "--join_timeout", 4)
    assert_one_line_error(done, 1, "rank 0 (agent) did not come within --join_timeout 4 s", "--master_addr")
    assert f"waiting for rank 0 (agent): nothing answers at 127.0.0.1 port {port}" in done.stdout


@pytest.mark.slow
def test_rank_0_of_torchrun_that_never_comes_is_named():
    """torchrun's store, which is here in the process of the test, exists before rank 0 does."""
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    env = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    done = run_main("rl_rpc", "--join_timeout", 4, env=env | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert_one_line_error(done, 1, "rank 1 (observer1): rank 0 (agent) did not come within --join_timeout 4 s")
    assert "waiting for rank 0 (agent): it has not started yet" in done.stdout
    del store


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.draw(1)
def test_a_name_that_nobody_knows_is_waited_for_until_join_timeout(rank):
    place = ["--world_size", 2, "--rank", rank, "--master_addr", "agent.invalid", "--join_timeout", 0.5]
    done = run_main("rl_rpc", *place)
    assert_one_line_error(done, 1, f"rank {rank}", "did not come within --join_timeout 0.5 s", "agent.invalid")


LATE_NAME_SERVICE = """
import os, socket
plain = socket.gethostbyname
def gethostbyname(host):
    if host == "agent.svc" and not os.path.exists(os.environ["NAME_IS_KNOWN"]):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return plain("localhost" if host == "agent.svc" else host)
socket.gethostbyname = gethostbyname
"""


@pytest.mark.slow
def test_a_job_whose_name_becomes_known_late(tmp_path):
    """In a cluster, a pod's name may be resolved only some seconds after the pod has started."""
    (tmp_path / "sitecustomize.py").write_text(LATE_NAME_SERVICE)
    env = {"PYTHONPATH": str(tmp_path), "NAME_IS_KNOWN": str(tmp_path / "known")}
    flags = [*JOBS["rl_rpc"]["short"], "--master_addr", "agent.svc"]
    with RunningJob("rl_rpc", "terminals", flags, env=env, cold=True) as job:
        for process in job.processes:
            assert process.wait_for_text(": --master_addr agent.svc: Name or service not known", 30), job.text()
        (tmp_path / "known").touch()
        assert job.wait(60) == [0, 0, 0], job.text()
        assert job.errors() == ""


STRANGERS = [
    (2, "world_size 4", "rl_rpc", ["--world_size", "4", "--rank", "1"]),
    (2, "seed 7", "rl_rpc", ["--world_size", "3", "--rank", "1", "--seed", "7"]),
    (2, "mode rollout", "rl_rpc", ["--world_size", "3", "--rank", "1", "--mode", "rollout"]),
    (2, "package param_server", "param_server", ["--world_size", "3", "--rank", "1"]),
    (1, "--master_port", "rl_rpc", ["--world_size", "3", "--rank", "0"]),
]


@pytest.mark.slow
def test_a_rank_that_does_not_fit_is_refused_and_the_job_goes_on():
    """Ranks with other flags are started before rank 0, and wait for it. Still rank 0 defines the job."""
    port = free_port()
    place = ["--master_port", port, "--join_timeout", 60]
    strangers = [start_main(package, *flags, *place) for _, _, package, flags in STRANGERS[:-1]]
    for stranger in strangers:
        assert stranger.wait_for_text("waiting for rank 0"), stranger.text()
    agent = start_main("rl_rpc", *short("rl_rpc"), *place, "--rank", 0)
    wait_for_listener(port)
    _, _, package, flags = STRANGERS[-1]
    strangers.append(start_main(package, *flags, *place))
    for stranger, (status, word, _, _) in zip(strangers, STRANGERS, strict=True):
        done = stranger.result(60)
        assert done.returncode == status and word in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    others = [start_main("rl_rpc", *short("rl_rpc"), *place, "--rank", rank) for rank in (1, 2)]
    for rank in [agent, *others]:
        done = rank.result(90)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_that_has_joined_already_or_has_another_seed_is_refused():
    port = free_port()
    place = ["--world_size", 3, "--master_port", port, "--join_timeout", 60]
    running = [start_main("rl_rpc", *place, "--rank", rank, env={"PYTHONUNBUFFERED": "1"}) for rank in (0, 1)]
    try:
        assert running[1].wait_for_text(r"waiting for rank 2 \(observer2\)")  # so it has joined
        second = run_main("rl_rpc", *place, "--rank", 1, timeout=30)
        assert second.returncode == 2, second.stderr
        assert "refused, because this rank has joined already, as process" in second.stderr
        other = run_main("rl_rpc", *place, "--rank", 2, "--seed", 7, timeout=30)
        assert_one_line_error(other, 2, "refused, because it was started with seed 7, and this job with 1")
    finally:
        for process in running:
            process.kill()


def wait_for_listener(port, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), 1).close()
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port}")


# ------------------------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("package, way", [("rl_rpc", "spawned"), pytest.param("rnn_rpc", "torchrun", **SLOW)])
@pytest.mark.draw(1)
def test_a_job_that_lost_a_rank_comes_back(package, way, tmp_path):
    checkpoint, summary = tmp_path / "checkpoint.pt", tmp_path / "summary.json"
    lengths = {  # long enough to be killed in the middle
        "rl_rpc": ["--max_episodes", "30", "--reward_threshold", "1e9", "--eval_episodes", "1"],
        "rnn_rpc": ["--epochs", "8", "--corpus_tokens", "40000"],
    }  # param_server: in tests/jobs/param_server/test_runs.py
    flags = [*lengths[package], "--checkpoint", str(checkpoint), "--summary_json", str(summary)]
    flags += ["--max_restarts", "1"] if way == "spawned" else []
    with RunningJob(package, way, flags, runner_flags=["--max-restarts", "1"]) as job:
        assert job.wait_for_text(JOBS[package]["training"], 90)
        deadline = time.monotonic() + 60
        while not checkpoint.exists():
            assert time.monotonic() < deadline, job.text()
            time.sleep(0.02)
        os.kill(job.pid_of(LAST_RANK[package]), signal.SIGKILL)
        statuses = job.wait(180)
        assert statuses == [0], job.text()
        assert job.processes[0].output().splitlines()[-1] == "The job was restarted 1 time.", job.text()
        assert "Going on" in job.text()
        assert not job.survivors()
    assert json.loads(summary.read_text())["restarts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "way, flags, older",
    [("spawned", ["--max_restarts", "1"], "a file of another job"), ("torchrun", [], "no file")],
)
@pytest.mark.draw(1)
def test_without_a_checkpoint_of_its_own_it_starts_afresh_and_says_so(way, flags, older, tmp_path):
    path = tmp_path / "c.pt"
    if older == "a file of another job":
        earlier = run_main("rl_rpc", "--max_episodes", 20, "--eval_episodes", 1, "--checkpoint", path)
        assert earlier.returncode == 0 and path.exists()
    # The first checkpoint is written after 100 episodes, so not before the rank is killed.
    flags = [*flags, "--mode", "rollout", "--checkpoint", str(path), "--eval_episodes", "1"]
    flags += ["--log_interval", "100", "--reward_threshold", "1e9", "--max_episodes", "100"]
    with RunningJob("rl_rpc", way, flags, runner_flags=["--max-restarts", "1"] if way == "torchrun" else []) as job:
        assert job.wait_for_text("This will run until", 60)
        os.kill(job.pid_of(1), signal.SIGKILL)
        assert job.wait(120) == [0], job.text()
        assert "This job has saved no checkpoint yet: starting from the beginning." in job.text()
        assert "Going on after" not in job.text()


KILLED_AT_ITS_FIRST_FORK = """
import os, signal, sys
if "multiprocessing.forkserver" in " ".join(sys.orig_argv) and not os.path.exists(os.environ["KILLED"]):
    def fork():
        open(os.environ["KILLED"], "x")
        os.kill(os.getpid(), signal.SIGKILL)
    os.fork = fork
"""


@pytest.mark.slow
def test_a_killed_fork_server_ends_the_job_or_restarts_it(tmp_path):
    """The system may kill it when memory runs out: once while it starts the first rank, once during the work."""
    (tmp_path / "sitecustomize.py").write_text(KILLED_AT_ITS_FIRST_FORK)
    flags = ["--mode", "rollout", "--checkpoint", str(tmp_path / "c.pt"), "--max_restarts", "1"]
    env = {"PYTHONPATH": tmp_path, "KILLED": tmp_path / "killed"}
    with RunningJob("rl_rpc", "spawned", [*JOBS["rl_rpc"]["long"], *flags], env=env, cold=True) as job:
        assert job.wait_for_text("This will run until", 60), job.text()
        lost = "rl_rpc: the process from which the ranks are forked has ended\n"
        assert job.processes[0].errors() == f"{lost}rl_rpc: restart 1 of 1\n", job.text()
        (fork_server,) = forked(children_of(job.processes[0].pid))
        os.kill(fork_server, signal.SIGKILL)
        assert job.wait(15) == [1], job.text()
        assert job.errors().count(lost.strip()) == 2 and "lost rank" not in job.text(), job.text()
        assert not job.survivors()


# -------------------------------------------------------------------------------------------------------------- --check


def test_check_explains_the_machine():
    done = run_main("rl_rpc", "--check", env={"OMP_NUM_THREADS": 3})
    assert (done.returncode, done.stderr) == (0, "")
    threads = "3 intra-op thread(s) in each of 2 rank(s)"
    for word in (socket.gethostname(), "127.0.0.1 (lo)", threads, "GPUs", "ranks on cpu", "round trip"):
        assert word in done.stdout, (word, done.stdout)


def test_check_measures_the_round_trip_of_each_pair():
    with RunningJob("rl_rpc", "terminals", ["--check"]) as job:
        assert job.wait(60) == [0, 0, 0], job.text()
        trips = re.findall(r"round trip +rank (\d) \(\w+\) to rank (\d) \(\w+\): ([\d.]+) ms", job.text())
    assert {(a, b) for a, b, _ in trips} == {(a, b) for a in "012" for b in "012" if a != b}
    assert all(0.02 < float(milliseconds) < 1000 for *_, milliseconds in trips)


PEER_LOST_IN_SHUTDOWN = """
import sys
sys.path.insert(0, "rl_rpc")
from glue import launch
from torch.distributed.rpc import api

def lost(*_, **__):
    raise RuntimeError("EOF: end of file")

launch._keep_console_clean()
api._all_gather = lost
try:
    api._wait_all_workers.__wrapped__()
except RuntimeError as error:
    print("raised", error)
"""


def test_torch_prints_no_traceback_when_a_peer_dies_in_shutdown(tmp_path):
    (tmp_path / "program.py").write_text(PEER_LOST_IN_SHUTDOWN)
    done = run_script(tmp_path / "program.py", cwd=ROOT)
    assert (done.stdout, done.stderr) == ("raised EOF: end of file\n", "")


@pytest.mark.parametrize("package", RL_AND_SLOWLY_THE_OTHERS)
@pytest.mark.draw(2)
def test_without_torch_no_process_is_left(package, tmp_path):
    """The fork server imports main.py, which must not start a further fork server there."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    with start_main(package, env={"PYTHONPATH": tmp_path}, cold=True) as process:
        assert process.wait() == 1 and "No module named 'torch'" in process.errors()
        deadline = time.monotonic() + 10
        while process.members():
            assert time.monotonic() < deadline
            time.sleep(0.05)


# --------------------------------------------------------------------------------------------------- unusual machines


@pytest.mark.slow
@pytest.mark.parametrize("files, ranks", [(64, 40), (40, 12)])
@pytest.mark.draw(1)
def test_a_rank_that_cannot_be_started_ends_the_job_at_once(files, ranks):
    """With so few open files, the fork server can start some ranks only."""
    limited = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", sys.executable]
    with tempfile.TemporaryDirectory() as temporary:  # its name is short enough for the address of a socket
        done = run_main("rl_rpc", "--world_size", ranks, by=limited, env={"TMPDIR": temporary}, timeout=60)
        assert done.returncode == 1
        assert "rl_rpc: cannot start all ranks: Too many open files" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        assert left_in(temporary) == []
