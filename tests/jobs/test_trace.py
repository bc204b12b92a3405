"""tools/trace.py records both sides of every RPC of any program, however its ranks are started and end."""

import collections
import functools
import json
import os
import re
import sys

import pytest
from matplotlib.figure import Figure

from helpers import ROOT, load_module
from jobs import JOBS, free_port
from programs import run_script

CALLS = ("sync", "async", "remote")
TRACE = str(ROOT / "tools" / "trace.py")
RL = [*JOBS["rl_rpc"]["size"], *JOBS["rl_rpc"]["short"], "--max_episodes", "20"]
trace = load_module(ROOT / "tools" / "trace.py")


def events_in(path):
    """Return the events of a file, after checking what ui.perfetto.dev needs: bars are nested, arrows have two ends."""
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


def names_of(events):
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def calls_of(events):
    """Return {(caller, callee, function): how many calls were recorded on both sides}, without torch's own calls."""
    names = names_of(events)
    served = {bar["args"]["call"]: names[bar["pid"]] for bar in bars(events, "run")}
    made = [bar for bar in events if bar.get("cat") in CALLS and not bar["name"].startswith("torch.rpc.")]
    assert all(served.get(bar["args"]["call"]) == bar["args"]["to"] for bar in made)
    return collections.Counter((names[bar["pid"]], bar["args"]["to"], bar["name"]) for bar in made)


def run_trace(*words, **how):
    """Run tools/trace.py to its end."""
    return run_script("tools/trace.py", *words, **how)


# ------------------------------------------------------------------------------------------ what a recording contains


def test_both_sides_of_every_rpc_of_a_job_are_recorded(tmp_path):
    path, summary = tmp_path / "all.json", tmp_path / "summary.json"
    done = run_trace(path, "--", sys.executable, ROOT / "rl_rpc" / "main.py", *RL, "--summary_json", summary)
    assert done.returncode == 0, done.stderr
    events, result = events_in(path), json.loads(summary.read_text())
    steps, episodes = result["env_steps"], result["episodes"]
    assert list(names_of(events).values()) == ["agent", "observer1", "observer2"]
    counts = calls_of(events)
    for name in ("select_action", "report_reward"):
        assert counts["observer1", "agent", name] + counts["observer2", "agent", name] == steps
    assert counts["agent", "observer1", "Observer"] == 1 and counts["agent", "observer2", "run_episode"] == episodes
    assert len(bars(events, "step")) == episodes == 20
    served = {bar["args"]["call"]: bar for bar in bars(events, "run")}
    for call in bars(events, "sync", "select_action"):
        run = served[call["args"]["call"]]
        assert call["ts"] < run["ts"] < run["ts"] + run["dur"] < call["ts"] + call["dur"]
    assert any(event["name"] == "torch.rpc._gather_to_leader" for event in events), "torch's own calls"
    made = [event for event in events if event.get("cat") in CALLS]
    assert sum(event["ph"] == "s" for event in events) == 2 * len(made), "one for the call, one for the answer"
    row = re.search(r"observer1 -> agent: select_action +([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+)\n", done.stderr)
    whole, wire, at_callee = map(float, row.groups()[1:])
    assert 0 < at_callee < whole and 0 < wire < whole and int(row[1].replace(",", "")) > 100
    assert sorted(os.listdir(tmp_path)) == ["all.json", "summary.json"]


@pytest.mark.quick
def test_clocks_of_several_hosts_are_lined_up():
    """Three hosts, each called by the one before. Clocks 7 s and 3 s wrong are corrected to within a round trip."""
    ahead = {"a": 0, "b": 7_000_000_000, "c": -3_000_000_000}
    hosts = list(ahead)

    def call(caller, callee, sent, arrived, left, back):
        """Return a call with these four times, as match() does."""
        sides = ((caller, sent, back), (callee, arrived, left))
        both = [{"name": "f", "pid": r, "ts": t + ahead[hosts[r]], "dur": end - t} for r, t, end in sides]
        return both[0], both[1], both[1]

    calls = [
        call(0, 1, 0, 1000, 1500, 9000),
        call(0, 1, 20_000, 27_000, 27_500, 28_500),
        call(2, 1, 50, 650, 700, 1300),
    ]
    clocks = trace.line_up(calls, hosts)
    for host, (shift, error) in clocks.items():
        assert abs(shift + ahead[host]) <= error, host
    assert clocks["a"] == (0, 0) and clocks["b"][1] <= 1000 and clocks["c"][1] <= 2000


# --------------------------------------------------------------------------------------- whatever program, as it runs

# Rank 1 calls rank 0, and is killed. The program is rank 0, and starts rank 1 with subprocess.
PAIR = """
import os, signal, subprocess, sys, threading
import torch.distributed.rpc as rpc

def increment(x):
    return x + 1

def never():
    threading.Event().wait()

if __name__ == "__main__":
    if "RANK" not in os.environ:
        started = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"RANK": "1"})
    rank = int(os.environ.get("RANK", "0"))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 1:
        for x in range(1000):
            assert rpc.rpc_sync("worker0", increment, args=(x,)) == x + 1
        rpc.rpc_async("worker0", never)
        os.kill(os.getpid(), signal.SIGKILL)
    started.wait()
    os._exit(7)
"""


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Write PAIR into a file; return the words of its command."""
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "pair.py").write_text(PAIR)
    return [tmp_path / "pair.py", tmp_path / "meet"]


def forty_lines():
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def test_the_forty_lines_of_the_readme_are_drawn(tmp_path):
    (tmp_path / "forty.py").write_text(forty_lines().replace("29500", str(free_port())))
    done = run_trace("step.png", "--", sys.executable, "forty.py", cwd=tmp_path)
    assert done.returncode == 0 and "to_here:   a copy, which has counted to 2" in done.stdout
    assert re.search(r"worker0 -> worker1: increment +2 +[\d.]+ +[\d.]+ +[\d.]+\n", done.stderr), done.stderr
    assert "trace" not in done.stdout
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["forty.py", "step.png"]


def test_the_calls_of_a_killed_rank_are_in_the_file(tmp_path, pair):
    """Also the last one, which was not answered. The other rank leaves without cleaning up."""
    done = run_trace(tmp_path / "all.json", "--", sys.executable, *pair)
    assert done.returncode == 7, done.stderr
    events = events_in(tmp_path / "all.json")
    (number,) = (number for number, name in names_of(events).items() if name == "worker1")
    assert len([bar for bar in bars(events, "sync", "increment") if bar["pid"] == number]) == 1000
    assert len(bars(events, "run", "increment")) == 1000
    (last,) = bars(events, "async", "never (unfinished)")
    assert last["pid"] == number and last["args"]["to"] == "worker0"
    assert re.search(r"worker1 -> worker0: never +1 +1 unanswered\n", done.stderr), done.stderr


class Silent:
    """Its objects cannot be formatted."""

    def method(self):
        pass

    def __call__(self):
        pass

    def __repr__(self):
        raise RuntimeError("not initialized yet")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("func", "name"),
    [
        (Silent().method, "method"),
        (functools.partial(Silent().method, 1), "method"),
        (functools.partial(functools.partial(forty_lines, 1), 2), "forty_lines"),
        (Silent(), "Silent"),
        (Silent, "Silent"),
    ],
)
def test_a_call_is_named_without_formatting_what_is_called(func, name):
    assert trace.name_of((func, (), {})) == name


@pytest.mark.quick
@pytest.mark.parametrize("name", ["run", "step", "work", "backward"])
def test_a_call_is_drawn_as_waiting_whatever_its_function_is_called(name):
    assert trace.state_of({"cat": "sync", "name": name}) == "waiting"


@pytest.mark.quick
def test_a_bar_that_began_before_the_picture_does_not_hide_the_name_of_the_next():
    axes = Figure().subplots()
    times = {"run_trainer": (-5.0, 30e3), "forward": (0.0, 9e3), "step": (10e3, 9e3)}
    bars = [{"pid": 0, "tid": 0, "cat": "run", "name": name, "ts": ts, "dur": dur} for name, (ts, dur) in times.items()]
    trace.draw_bars(axes, bars, {(0, 0): 0}, 0.0, 20e3)
    assert {text.get_text().strip() for text in axes.texts} == {"forward", "step"}
