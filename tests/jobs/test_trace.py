"""--trace records both sides of every RPC of all ranks, in one file or picture, however a job is started and ends."""

import collections
import json
import os
import re
import signal
import threading

import pytest
import torch.distributed.autograd
import torch.distributed.optim

from helpers import assert_one_line_error, assert_refused, package_on_path
from jobs import JOBS, Job
from programs import run_main
from two_hosts import ADDRESSES, NAMES, TwoHosts, why_not

CALLS = ("sync", "async", "remote")
RL = [*JOBS["rl_rpc"]["size"], *JOBS["rl_rpc"]["short"], "--max_episodes", "20"]


def events_in(path):
    """Return a trace's events, after checking what ui.perfetto.dev needs: bars are nested, arrows have two ends."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes, ends = collections.defaultdict(list), collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((round(event["ts"] * 1e3), round(event["dur"] * 1e3)))
        elif event["ph"] in "sf":
            ends[event["id"]].append(event)
    for bars in lanes.values():  # in a lane, two bars are nested or do not overlap
        open_bars = []
        for start, length in sorted(bars, key=lambda bar: (bar[0], -bar[1])):
            assert start >= 0 and length >= 0
            while open_bars and open_bars[-1] <= start:
                open_bars.pop()
            assert not open_bars or start + length <= open_bars[-1] + 1
            open_bars.append(start + length)
    for tail, tip in ends.values():
        assert (tail["ph"], tip["ph"]) == ("s", "f") and tail["ts"] <= tip["ts"]
        for end in (tail, tip):  # an arrow's end belongs to the bar at this time
            time = round(end["ts"] * 1e3)
            assert any(start <= time < start + length for start, length in lanes[end["pid"], end["tid"]]), end
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(lanes) <= named
    return events


def bars(events, cat, name=None):
    return [event for event in events if event.get("cat") == cat and name in (None, event["name"])]


def arrows(events):
    """Return {id: (event at the tail, event at the tip)}."""
    ends = collections.defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event["pid"])
    return ends


# ------------------------------------------------------------------------------------------------ what a trace contains


def test_a_trace_shows_both_sides_of_every_rpc(tmp_path):
    trace, summary, plain = (tmp_path / name for name in ("trace.json", "summary.json", "plain.json"))
    done = run_main("rl_rpc", *RL, "--trace", trace, "--summary_json", summary)
    assert (done.returncode, done.stderr) == (0, "")
    events, result = events_in(trace), json.loads(summary.read_text())
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"agent", "observer1", "observer2"}
    for name in ("select_action", "report_reward"):
        calls, runs = bars(events, "sync", name), bars(events, "run", name)
        assert len(calls) == len(runs) == result["env_steps"]
        assert {call["pid"] for call in calls} == {1, 2} and {run["pid"] for run in runs} == {0}
        assert {call["args"]["to"] for call in calls} == {"agent"}
        served = {run["args"]["call"]: run for run in runs}
        for call in calls:
            run = served[call["args"]["call"]]
            assert call["ts"] < run["ts"] < run["ts"] + run["dur"] < call["ts"] + call["dur"]
    assert len(bars(events, "remote", "Observer")) == 2 and len(bars(events, "step")) == result["episodes"] == 20
    assert len(bars(events, "async", "run_episode")) == len(bars(events, "run", "run_episode")) == 40
    assert any(event["name"] == "torch.rpc._gather_to_leader" for event in events), "torch's own calls"
    matched = [event for event in events if event.get("cat") in CALLS]
    assert len(arrows(events)) == 2 * len(matched), "one for the call, one for the answer"
    row = re.search(r"observer1 -> agent: select_action +([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+)\n", done.stdout)
    whole, wire, at_callee = map(float, row.groups()[1:])
    assert 0 < at_callee < whole and 0 < wire < whole and int(row[1].replace(",", "")) > 100
    assert sorted(os.listdir(tmp_path)) == ["summary.json", "trace.json"]

    assert run_main("rl_rpc", *RL, "--summary_json", plain).returncode == 0  # recording changes nothing
    plain = json.loads(plain.read_text())
    for figure in ("env_steps", "running_reward", "eval_mean_reward"):
        assert plain[figure] == result[figure], figure


def test_answers_that_leave_later_hold_no_thread(tmp_path):
    trace = tmp_path / "trace.json"
    assert run_main("rl_rpc", *RL, "--mode", "batched", "--trace", trace).returncode == 0
    events = events_in(trace)
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    held = bars(events, "held", "select_action")
    assert len(held) == len(bars(events, "sync", "select_action"))
    assert all(lanes[bar["pid"], bar["tid"]].startswith("answers owed") for bar in held)
    ends = {bar["args"]["call"]: bar["ts"] + bar["dur"] for bar in held}
    for call in bars(events, "sync", "select_action"):
        assert call["ts"] < ends[call["args"]["call"]] < call["ts"] + call["dur"]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["rnn_rpc", "ddp_rpc", "param_server"])
def test_backward_and_optimizer_have_bars(package, tmp_path):
    trace = tmp_path / "trace.json"
    done = run_main(package, *JOBS[package]["size"], *JOBS[package]["short"], "--trace", trace)
    assert done.returncode == 0, done.stderr
    events = events_in(trace)
    steps = bars(events, "step")
    assert steps and len(bars(events, "work", "backward")) == len(bars(events, "work", "optimizer step")) == len(steps)
    assert len(bars(events, "async", "torch.optim._new_local_optimizer")) + len(
        bars(events, "remote", "torch.optim._new_local_optimizer")
    )
    if package == "param_server":  # the method is named, not torch's helper
        assert len(bars(events, "run", "forward")) == len(steps) and not bars(events, "run", "call_method")


@pytest.mark.parametrize("suffix", ["png", "json"])
def test_a_job_without_rpcs_keeps_its_status(suffix, tmp_path):
    trace = tmp_path / f"trace.{suffix}"
    done = run_main("rnn_rpc", "--corpus", tmp_path / "missing.txt", "--trace", trace)
    assert_one_line_error(done, 1, "missing.txt")
    assert ("--trace: no RPC was recorded, so there is no picture" in done.stdout) == (suffix == "png")
    assert trace.exists() == (suffix == "json")


def test_a_trace_of_an_unknown_kind_is_refused(capsys):
    assert_refused("rl_rpc", ["--trace", "t.svg"], capsys, "--trace t.svg", "must end in .json or .png")


def test_a_trace_that_cannot_be_written_fails_in_one_line(tmp_path):
    trace = tmp_path / "full.json"
    trace.symlink_to("/dev/full")
    done = run_main("rl_rpc", *RL, "--trace", trace)
    assert_one_line_error(done, 1, "full.json", "No space left on device")


# ------------------------------------------------------------------------------------- however it is started, and ends


@pytest.mark.slow
def test_ranks_that_were_started_one_by_one_leave_one_file(tmp_path):
    trace = tmp_path / "trace.json"
    with Job("rl_rpc", "terminals", [*JOBS["rl_rpc"]["short"], "--trace", str(trace)]) as job:
        assert set(job.wait(120)) == {0}, job.text()
        assert job.text().count("RPCs, median milliseconds") == 1
    events = events_in(trace)
    assert {event["pid"] for event in bars(events, "sync")} == {1, 2} and bars(events, "run", "select_action")
    assert os.listdir(tmp_path) == ["trace.json"]


def test_a_job_that_lost_a_rank_leaves_the_trace_of_the_others(tmp_path):
    with Job("rl_rpc", "spawned", [*JOBS["rl_rpc"]["long"], "--trace", str(tmp_path / "trace.json")]) as job:
        assert job.wait_for_text("Episode 10", 60)
        os.kill(job.pid_of(1), signal.SIGKILL)
        statuses = job.wait(20)
        assert set(statuses) <= {1, -signal.SIGKILL}, job.text()
    events = events_in(tmp_path / "trace.json")
    assert {event["pid"] for event in bars(events, "run")} == {0, 2}, "those that could still hand in"
    last = max(bars(events, "async", "run_episode"), key=lambda bar: (bar["args"]["to"] == "observer1", bar["ts"]))
    assert 2 * last["args"]["call"] not in arrows(events), "the lost rank's side of this call is not recorded"
    assert len(bars(events, "sync", "select_action")) > 50
    assert os.listdir(tmp_path) == ["trace.json"]


@pytest.mark.slow
def test_an_interrupted_job_leaves_its_picture(tmp_path):
    with Job("rl_rpc", "spawned", [*JOBS["rl_rpc"]["long"], "--trace", str(tmp_path / "trace.png")]) as job:
        assert job.wait_for_text("Episode 10", 60)
        os.killpg(job.processes[0].pid, signal.SIGINT)
        assert job.wait(20) == [130] and not job.errors(), job.text()
    picture = tmp_path / "trace.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and 2_000 < picture.stat().st_size < 500_000


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_between_two_hosts_no_arrow_points_back_in_time(tmp_path):
    trace = tmp_path / "trace.json"
    with TwoHosts(delay_ms=5.0) as hosts:
        flags = [*JOBS["rl_rpc"]["short"], "--trace", trace, "--master_addr", ADDRESSES[0]]
        with Job("rl_rpc", "terminals", flags, hosts=hosts) as job:
            assert job.wait(120) == [0, 0, 0], job.text()
            assert re.search(rf"The clock of {NAMES[1]} was corrected by \S+ ms .error at most \d", job.text())
    events = events_in(trace)  # also checks the arrows
    served = {run["args"]["call"]: run for run in bars(events, "run")}
    calls = [call for call in bars(events, "sync", "select_action") if call["pid"] == 1]  # rank 1 is on the other host
    assert min(call["dur"] for call in calls) > 10_000 and all(call["args"]["call"] in served for call in calls)


# ---------------------------------------------------------------------------------------------------- parts, by hand


def test_clocks_of_several_hosts_are_lined_up():
    """Three hosts, each called by the one before. Clocks 7 s and 3 s wrong are corrected to within a round trip."""
    ahead = {"a": 0, "b": 7_000_000_000, "c": -3_000_000_000}
    hosts = dict(enumerate(ahead))

    def call(caller, callee, sent, arrived, left, back):
        """Return a call with these four times, as join() does."""
        sides = ((caller, sent, back), (callee, arrived, left))
        bars = [{"pid": r, "ts": t + ahead[hosts[r]], "dur": end - t} for r, t, end in sides]
        return bars[0], bars[1], bars[1]

    pairs = [
        call(0, 1, 0, 1000, 1500, 9000),
        call(0, 1, 20_000, 27_000, 27_500, 28_500),
        call(2, 1, 50, 650, 700, 1300),
    ]
    with package_on_path("rl_rpc"):
        from glue import timeline

        clocks = timeline.line_up(pairs, hosts)
    for host, (shift, error) in clocks.items():
        assert abs(shift + ahead[host]) <= error, host
    assert clocks["a"] == (0, 0) and clocks["b"][1] <= 1000 and clocks["c"][1] <= 2000


@pytest.fixture
def recorder(monkeypatch):
    """Yield the module glue.trace of rl_rpc; restore afterwards what it replaces in torch."""
    from torch.distributed.rpc import api, internal

    replaced = [(api, name) for name in ("PythonUDF", "_invoke_rpc_python_udf", "_invoke_remote_python_udf")]
    replaced += [(api, "_enable_rpc_profiler"), (internal, "_run_function"), (torch._C.Future, "wait")]
    replaced += [(torch.distributed.autograd, "backward"), (torch.distributed.optim.DistributedOptimizer, "step")]
    for owner, name in replaced:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    with package_on_path("rl_rpc"):
        from glue import trace

        yield trace


def test_a_torch_without_a_function_that_is_replaced_is_refused(recorder, monkeypatch):
    monkeypatch.delattr(torch.distributed.rpc.api, "PythonUDF")
    with pytest.raises(ValueError, match=r"^--trace does not work with torch .*, which has no .*api\.PythonUDF$"):
        recorder.start(0, ["alone"])


def test_memory_is_bounded_and_the_last_bars_are_kept(recorder, capsys, monkeypatch):
    monkeypatch.setattr(recorder, "MOST_BARS", 100)
    recorder.start(0, ["alone"])
    for number in range(250):
        with recorder.bar("step", f"step {number}"):
            pass
    part = recorder.hand_in()
    assert [bar["name"] for bar in part["bars"]] == [f"step {number}" for number in range(150, 250)] and part["full"]


def test_a_wait_for_what_is_there_already_is_none(recorder):
    recorder.start(0, ["alone"])
    future, later = torch.futures.Future(), torch.futures.Future()
    future.set_result(1)
    threading.Timer(0.05, later.set_result, (2,)).start()
    assert (future.wait(), later.wait(), torch.futures.wait_all([future, later])) == (1, 2, [1, 2])
    (bar,) = recorder.hand_in()["bars"]
    assert bar["name"] == "wait" and bar["dur"] > 40e6


def test_what_is_unfinished_at_the_end_ends_together(recorder):
    recorder.start(0, ["alone"])
    with recorder.bar("step", "outer"), recorder.bar("work", "inner"), recorder.bar("wait", "innermost"):
        bars = recorder.hand_in()["bars"]
    assert [bar["name"] for bar in bars] == [f"{name} (unfinished)" for name in ("outer", "inner", "innermost")]
    assert len({bar["ts"] + bar["dur"] for bar in bars}) == 1, "or a bar would reach out of the one in which it lies"
