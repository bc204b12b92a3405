"""The lifecycle that launch.py and job.py promise, for every package: ports, sockets, meeting, Ctrl-C, restarts."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time

import pytest
import torch

from helpers import PACKAGES, assert_one_line_error, run_main, start_main
from jobs import JOBS, Job, free_port, ranks_of, session_members

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
        ("ddp_rpc", "averaged"),
        ("ddp_rpc", "pipelined"),
        ("param_server", "replica"),
    ],
)
def test_no_mode_writes_to_stderr(package, mode):
    done = run_main(package, *short(package), "--mode", mode)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------------- sockets and ports


def listening_inodes():
    """Socket inode -> local address (hex) of everything that listens on this machine over TCP."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    found[fields[9]] = fields[1].partition(":")[0]
    return found


class SocketSampler(threading.Thread):
    """Notes, again and again until stopped, which addresses the processes of a job listen on."""

    LOOPBACK = frozenset({"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"})

    def __init__(self, sessions):
        super().__init__(daemon=True)
        self.sessions, self.samples, self.seen, self.stopping = sessions, 0, set(), threading.Event()

    def run(self):
        while not self.stopping.is_set():
            listening = listening_inodes()
            for session in self.sessions:
                for pid in session_members(session):
                    with contextlib.suppress(OSError):
                        for descriptor in os.listdir(f"/proc/{pid}/fd"):
                            with contextlib.suppress(OSError):
                                link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                                if link.startswith("socket:[") and link[8:-1] in listening:
                                    self.seen.add(listening[link[8:-1]])
            self.samples += 1

    def stop(self):
        self.stopping.set()
        self.join()


def watch_sockets(package, way):
    """The host's name must not save us: where we may, the job runs on a host whose name resolves to nothing."""
    with Job(package, way, JOBS[package]["short"], other_hostname=True) as job:
        sampler = SocketSampler([process.pid for process in job.processes])
        sampler.start()
        statuses = job.wait(120)
        sampler.stop()
        assert set(statuses) == {0}, job.text()
        assert job.errors() == ""
        assert not re.search(r"(?i)warning|deprecat", job.text()), job.text()
    assert sampler.samples > 20
    assert sampler.seen, "the sampler saw no listening socket at all: it does not work"
    assert sampler.seen <= SocketSampler.LOOPBACK, sampler.seen


@pytest.mark.parametrize("package", PACKAGES)
def test_a_spawned_run_is_quiet_and_listens_on_loopback_only(package):
    watch_sockets(package, "spawned")


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_a_run_in_terminals_is_quiet_and_listens_on_loopback_only(package):
    watch_sockets(package, "terminals")


@pytest.mark.slow
def test_four_jobs_side_by_side():
    jobs = [start_main(package, *short(package)) for package in PACKAGES]
    for package, job in zip(PACKAGES, jobs, strict=True):
        _, errors = job.communicate(timeout=240)
        assert (job.returncode, errors) == (0, ""), (package, errors)


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_main("rl_rpc", "--world_size", 2, "--rank", 0, "--master_port", port)
    assert_one_line_error(done, 1, str(port), "--master_port")


def test_a_foreign_listener_is_not_waited_for_in_silence():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_main(
            "rl_rpc", "--world_size", 2, "--rank", 1, "--master_port", port, "--join_timeout", 5, timeout=60
        )
    assert_one_line_error(done, 1, "rank 1 (observer1)", str(port))


# --------------------------------------------------------------------------------------------------- meeting the others


@pytest.mark.parametrize("package", RL_AND_SLOWLY_THE_OTHERS)
def test_a_rank_that_never_comes_is_named(package):
    names, port = JOBS[package]["names"], free_port()
    absent = LAST_RANK[package]
    flags = [*short(package), "--join_timeout", "6", "--master_port", port]
    ranks = [start_main(package, *flags, "--rank", rank) for rank in range(len(names)) if rank != absent]
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 1
        assert f"rank {absent} ({names[absent]}) did not come within --join_timeout 6 s" in errors, errors


def test_rank_0_that_never_comes_is_named():
    done = run_main("rl_rpc", "--world_size", 2, "--rank", 1, "--master_port", free_port(), "--join_timeout", 3)
    assert_one_line_error(done, 1, "rank 0 (agent) did not come within --join_timeout 3 s", "--master_addr")


@pytest.mark.parametrize(
    "package, flags, word",
    [
        ("rl_rpc", ["--world_size", "4", "--rank", "1"], "world_size 4"),
        pytest.param("rl_rpc", ["--world_size", "3", "--rank", "1", "--mode", "rollout"], "mode rollout", **SLOW),
        pytest.param("param_server", ["--world_size", "3", "--rank", "1"], "package param_server", **SLOW),
        pytest.param("rl_rpc", ["--world_size", "3", "--rank", "0"], "--master_port", **SLOW),
    ],
)
def test_a_rank_that_does_not_fit_is_refused_and_the_job_goes_on(package, flags, word):
    port = free_port()
    place = ["--master_port", port, "--join_timeout", 60]
    agent = start_main("rl_rpc", *short("rl_rpc"), *place, "--rank", 0)
    wait_for_listener(port)
    stranger = run_main(package, *flags, *place)
    assert_one_line_error(stranger, 1 if word == "--master_port" else 2, word)
    others = [start_main("rl_rpc", *short("rl_rpc"), *place, "--rank", rank) for rank in (1, 2)]
    for rank in [agent, *others]:
        _, errors = rank.communicate(timeout=90)
        assert (rank.returncode, errors) == (0, "")


@pytest.mark.slow
def test_a_place_that_is_taken_is_refused():
    port = free_port()
    place = [*short("rl_rpc"), "--master_port", port, "--join_timeout", 60]
    first = [start_main("rl_rpc", *place, "--rank", rank) for rank in (0, 1)]
    wait_for_listener(port)
    time.sleep(4)  # let rank 1 say hello first: nothing tells from outside
    second = run_main("rl_rpc", *place, "--rank", 1)
    last = start_main("rl_rpc", *place, "--rank", 2)
    for rank in [*first, last]:
        rank.communicate(timeout=90)
    assert second.returncode == 2 and "is there already" in second.stderr, second.stderr
    assert [rank.returncode for rank in [*first, last]] == [0, 0, 0]


def wait_for_listener(port, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port), 1).close()
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port}")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_gpu_that_is_not_there_is_refused(package):
    done = run_main(package, "--device", "cuda", env={"CUDA_VISIBLE_DEVICES": ""})
    assert_one_line_error(done, 2, "--device cuda", "no CUDA GPU")


# --------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize(
    "package, way, target",
    [
        ("rl_rpc", "spawned", "group"),
        ("rl_rpc", "terminals", "one"),
        pytest.param("param_server", "spawned", "parent", marks=pytest.mark.slow),
        pytest.param("rnn_rpc", "spawned", "group", marks=pytest.mark.slow),
        pytest.param("rnn_rpc", "spawned", "parent", marks=pytest.mark.slow),
        pytest.param("rnn_rpc", "terminals", "one", marks=pytest.mark.slow),
        pytest.param("ddp_rpc", "spawned", "group", marks=pytest.mark.slow),
        pytest.param("ddp_rpc", "spawned", "parent", marks=pytest.mark.slow),
        pytest.param("ddp_rpc", "terminals", "one", marks=pytest.mark.slow),
        pytest.param("param_server", "terminals", "one", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_all_quietly_and_keeps_the_checkpoint(package, way, target, tmp_path):
    checkpoint = tmp_path / "checkpoint.pt"
    every = ["--checkpoint_every", "5"] if package == "param_server" else []
    with Job(package, way, [*JOBS[package]["long"], "--checkpoint", str(checkpoint), *every]) as job:
        assert job.wait_for_text(JOBS[package]["training"], 90)
        deadline = time.monotonic() + 60
        while not checkpoint.exists():
            assert time.monotonic() < deadline, job.text()
            time.sleep(0.05)
        if target == "group":
            os.killpg(job.processes[0].pid, signal.SIGINT)
        else:
            os.kill(job.processes[-1 if target == "one" else 0].pid, signal.SIGINT)
        statuses = job.wait(5)
        assert set(statuses) == {130}, (statuses, job.text())
        assert not job.survivors()
        assert "Traceback" not in job.text() and f"{package}: " not in job.text(), job.text()
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["scenario"] == package and saved["state"]


def test_a_killed_starting_process_takes_every_rank_with_it():
    with Job("rl_rpc", "spawned", JOBS["rl_rpc"]["long"]) as job:
        assert job.wait_for_text(JOBS["rl_rpc"]["training"], 60)
        ranks = ranks_of(job.processes[0].pid)
        assert len(ranks) == 3
        os.kill(job.processes[0].pid, signal.SIGKILL)
        assert job.wait(5) == [-signal.SIGKILL]
        assert not job.survivors(15), job.text()
        assert "lost the starting process" in job.errors(), job.text()


# ------------------------------------------------------------------------------------------------------------- restarts


@pytest.mark.slow
@pytest.mark.parametrize("way", ["spawned", "torchrun"])
@pytest.mark.parametrize("package", ["rl_rpc", "rnn_rpc", "ddp_rpc"])
def test_a_job_that_lost_a_rank_comes_back(package, way, tmp_path):
    checkpoint, summary = tmp_path / "checkpoint.pt", tmp_path / "summary.json"
    lengths = {  # long enough to be killed in the middle, short enough to wait for
        "rl_rpc": ["--max_episodes", "30", "--reward_threshold", "1e9", "--eval_episodes", "1"],
        "rnn_rpc": ["--epochs", "8", "--corpus_tokens", "40000"],
        "ddp_rpc": ["--epochs", "6"],
    }  # param_server: in test_ps_runs.py
    flags = [*lengths[package], "--checkpoint", str(checkpoint), "--summary_json", str(summary)]
    flags += ["--max_restarts", "2"] if way == "spawned" else []
    with Job(package, way, flags, runner_flags=["--max-restarts", "2"]) as job:
        assert job.wait_for_text(JOBS[package]["training"], 90)
        deadline = time.monotonic() + 60
        while not checkpoint.exists():
            assert time.monotonic() < deadline, job.text()
            time.sleep(0.02)
        os.kill(job.pid_of(LAST_RANK[package]), signal.SIGKILL)
        statuses = job.wait(180)
        assert statuses == [0], job.text()
        assert job.text(job.outputs[:1]).splitlines()[-1] == "The job was restarted 1 time.", job.text()
        assert "Going on" in job.text()
        assert not job.survivors()
    assert json.loads(summary.read_text())["restarts"] == 1


@pytest.mark.slow
def test_without_a_checkpoint_it_starts_afresh_and_says_so():
    with Job(
        "rl_rpc", "spawned", [*JOBS["rl_rpc"]["long"][:1], "30", "--eval_episodes", "1", "--max_restarts", "1"]
    ) as job:
        assert job.wait_for_text("Episode 10", 60)
        os.kill(job.pid_of(1), signal.SIGKILL)
        assert job.wait(120) == [0], job.text()
        assert "No checkpoint: starting afresh." in job.text()


# ---------------------------------------------------------------------------------------------------- remote exceptions


def test_a_remote_exception_is_told_once_with_type_message_and_rank():
    fault = (1, "remote", 0)  # observer1's next call raises KeyError: inside its run_episode, which the agent called
    with Job("rl_rpc", "spawned", JOBS["rl_rpc"]["long"], fault=fault) as job:
        assert job.wait(60) == [1]
        text = job.text()
    assert text.count("injected fault") == 1, text
    assert "rl_rpc: rank 1 (observer1): KeyError: 'injected fault'" in text, text


# -------------------------------------------------------------------------------------------------------------- --check


@pytest.mark.parametrize("package", PACKAGES)
def test_check_explains_the_machine(package):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_main(package, "--check", "--master_port", port)
    assert (done.returncode, done.stderr) == (0, "")
    for word in (
        socket.gethostname(),
        "127.0.0.1 (lo)",
        f"{port} is taken by process {os.getpid()}",
        "GPUs",
        "built in",
    ):
        assert word in done.stdout, (word, done.stdout)


def test_check_measures_the_round_trip_of_each_pair():
    with Job("rl_rpc", "terminals", ["--check"]) as job:
        assert job.wait(60) == [0, 0, 0], job.text()
        trips = re.findall(r"round trip +rank (\d) \(\w+\) to rank (\d) \(\w+\): ([\d.]+) ms", job.text())
    assert {(a, b) for a, b, _ in trips} == {(a, b) for a in "012" for b in "012" if a != b}
    assert all(0.02 < float(milliseconds) < 1000 for *_, milliseconds in trips)


# -------------------------------------------------------------------------------------------------------------- --trace


def test_trace_shows_every_rpc_of_every_rank(tmp_path):
    trace, summary = tmp_path / "trace.json", tmp_path / "summary.json"
    done = run_main("rl_rpc", *short("rl_rpc"), "--trace", trace, "--summary_json", summary)
    assert done.returncode == 0, done.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0 (agent)", "rank 1 (observer1)", "rank 2 (observer2)"}
    selected = [event for event in events if event["name"] == "sync select_action -> agent"]
    steps = json.loads(summary.read_text())["env_steps"]
    assert len(selected) == steps and {event["pid"] for event in selected} == {1, 2}
    assert all(event["dur"] > 0 for event in selected)
    assert sorted(os.listdir(tmp_path)) == ["summary.json", "trace.json"]
