"""tools/trace.py records both sides of every RPC of any program, however its ranks are started and end."""

import collections
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from helpers import ROOT, load_module
from jobs import JOBS
from programs import run_traced

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


def run(*command, **options):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, **options)


# ------------------------------------------------------------------------------------------ what a recording contains


def test_both_sides_of_every_rpc_of_a_job_are_recorded(tmp_path):
    path, summary = tmp_path / "all.json", tmp_path / "summary.json"
    done = run_traced(path, "rl_rpc", *RL, "--summary_json", summary)
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


def test_answers_that_leave_later_hold_no_thread(tmp_path):
    path = tmp_path / "all.json"
    assert run_traced(path, "rl_rpc", *RL, "--mode", "batched").returncode == 0
    events = events_in(path)
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    held = bars(events, "held", "select_action")
    assert len(held) == len(bars(events, "sync", "select_action")) > 100
    assert all(lanes[bar["pid"], bar["tid"]].startswith("answers owed") for bar in held)
    ends = {bar["args"]["call"]: bar["ts"] + bar["dur"] for bar in held}
    for call in bars(events, "sync", "select_action"):
        assert call["ts"] < ends[call["args"]["call"]] < call["ts"] + call["dur"]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["rnn_rpc", "ddp_rpc", "param_server"])
def test_backward_and_optimizer_have_bars(package, tmp_path):
    path = tmp_path / "all.json"
    done = run_traced(path, package, *JOBS[package]["size"], *JOBS[package]["short"])
    assert done.returncode == 0, done.stderr
    events = events_in(path)
    steps = bars(events, "step")
    assert steps and len(bars(events, "work", "backward")) == len(bars(events, "work", "optimizer step")) == len(steps)
    counts = calls_of(events)
    assert any(name == "torch.optim._new_local_optimizer" for _, _, name in counts)
    if package == "param_server":  # the method is named, not torch's helper
        assert len(bars(events, "run", "forward")) == len(steps) and not bars(events, "run", "call_method")


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


def forty_lines():
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def test_the_forty_lines_of_the_readme_are_drawn(tmp_path):
    (tmp_path / "forty.py").write_text(forty_lines())
    done = run(sys.executable, TRACE, "step.png", "--", sys.executable, "forty.py", cwd=tmp_path)
    assert done.returncode == 0 and "to_here:   a copy, which has counted to 2" in done.stdout
    assert re.search(r"worker0 -> worker1: increment +2 +[\d.]+ +[\d.]+ +[\d.]+\n", done.stderr), done.stderr
    assert "trace" not in done.stdout
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["forty.py", "step.png"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["t.svg", "--", "true"], "must end in .png or .json"),
        (["no/such/folder/t.json", "--", "true"], "that folder does not exist"),
        (["t.json"], "give a FILE"),
        (["--into", "x", "t.json", "--", "true"], "give a FILE"),
    ],
)
def test_wrong_command_lines_are_refused(words, why):
    done = run(sys.executable, TRACE, *words)
    assert done.returncode == 2 and why in done.stderr


def test_a_program_ends_as_it_does_without_being_recorded(tmp_path):
    for line, status in (("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("sys.exit('why')", 1)):
        code = f"import os, sys; print('out'); print('err', file=sys.stderr, flush=True); sys.stdout.flush(); {line}"
        plain = run(sys.executable, "-c", code)
        done = run(sys.executable, TRACE, tmp_path / "t.json", "--", sys.executable, "-c", code)
        assert done.returncode == plain.returncode == status
        assert done.stdout == plain.stdout and done.stderr.startswith(plain.stderr)
        assert "no process of the command has imported torch" in done.stderr and not os.listdir(tmp_path)


def test_a_users_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('customized', __name__, __file__)")
    code = "import sys, sitecustomize; print(sitecustomize.__file__, [p for p in sys.path if 'start-' in p])"
    command = [sys.executable, "-c", code]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = run(sys.executable, TRACE, tmp_path / "t.json", "--", *command, env=environ)
    mine = str(pathlib.Path(tmp_path, "sitecustomize.py"))
    # The tool is a Python process as well, whose output comes last.
    assert done.stdout == f"customized sitecustomize {mine}\n{mine} []\ncustomized sitecustomize {mine}\n"
