"""rpctrace records both sides of every RPC of any program, however its ranks are started and end."""

import collections
import functools
import json
import os
import re
import shutil
import signal
import sys

import pytest

from helpers import ROOT, load_oracle, package_on_path
from jobs import JOBS, free_port
from programs import Program, run_script

CALLS = ("sync", "async", "remote")
run_trace = functools.partial(run_script, "tools/rpctrace")
TOOL = ROOT / "tools" / "rpctrace"
with package_on_path("tools"):
    from rpctrace import cli, draw, read


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


def with_files_of(folder, piece, most):
    """Return a copy of the tool whose files grow by so many bytes, up to so many."""
    copy = shutil.copytree(TOOL, folder / "rpctrace")
    with open(copy / "record" / "rpctrace_files.py", "a") as file:
        file.write(f"PIECE, MOST = {piece}, {most}\n")
    return copy


def drawn(path, folder, capsys):
    """Draw a folder in this process; return what is printed."""
    cli.show_calls(str(folder), str(path))
    return capsys.readouterr().err


# ------------------------------------------------------------------------------------------ what a recording contains


@pytest.mark.xdist_group("rl_rpc")
def test_both_sides_of_every_rpc_of_a_job_are_recorded(rl_run):
    played = rl_run("batched")
    events, result = events_in(played.trace), played.summary
    observers = ["observer1", "observer2", "observer3"]
    assert list(names_of(events).values()) == ["agent", *observers]
    counts, made = calls_of(events), [event for event in events if event.get("cat") in CALLS]
    actions = [counts[name, "agent", "select_action"] for name in observers]
    assert sum(actions) == result["env_steps"] and counts["agent", "observer1", "Observer"] == 1
    assert counts["agent", "observer2", "run_episode"] == result["episodes"] == len(bars(events, "step"))
    assert result["episodes"] == load_oracle("rl_rpc").EPISODES
    assert any(event["name"] == "torch.rpc._gather_to_leader" for event in events), "torch's own calls"
    assert sum(event["ph"] == "s" for event in events) == 2 * len(made), "one for the call, one for the answer"
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    held = {bar["args"]["call"]: bar for bar in bars(events, "held", "select_action")}
    assert len(held) == sum(actions)
    for call in bars(events, "sync", "select_action"):
        answer = held[call["args"]["call"]]
        assert call["ts"] < answer["ts"] + answer["dur"] < call["ts"] + call["dur"]
        assert lanes[answer["pid"], answer["tid"]].startswith("answers owed")
    row = re.search(r"observer1 -> agent: select_action +([\d,]+) +([\d.]+) +([\d.]+) +([\d.]+)\n", played.table)
    whole, wire, at_callee = map(float, row.groups()[1:])
    assert 0 < at_callee < whole and 0 < wire < whole and int(row[1].replace(",", "")) == actions[0]
    assert sorted(os.listdir(played.trace.parent)) == ["end.pt", "summary.json", "trace.json"]


# --------------------------------------------------------------------------------------- whatever program, as it runs

# Rank 1 calls the others. A program without the variable RANK is rank 0, and starts rank 1 with subprocess.
PAIR = """
import os, resource, signal, subprocess, sys, threading
import torch.distributed.rpc as rpc

def increment(x):
    return x + 1

def never():
    threading.Event().wait()

if __name__ == "__main__":
    meet, what, *callees = sys.argv[1:]
    if "RANK" not in os.environ:
        started = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"RANK": "1"})
    rank = int(os.environ.get("RANK", "0"))
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meet}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=len(callees) + 1, rpc_backend_options=options)
    if rank == 1:
        if what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))  # of any file
        if what == "killed":
            rpc.rpc_async("worker0", never)
        for x in range(5 if what == "short" else 1000):
            for callee in callees:
                assert rpc.rpc_sync(callee, increment, args=(x,)) == x + 1
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    if what == "killed":
        started.wait()
        os._exit(7)
    rpc.shutdown()
    print("rank", rank, "is done")
"""


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Write PAIR into a file; return the words of its command."""
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "pair.py").write_text(PAIR)
    return [tmp_path / "pair.py", tmp_path / "meet"]


@pytest.mark.quick
def test_the_forty_lines_of_the_readme_are_drawn(tmp_path):
    program = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    (tmp_path / "forty.py").write_text(program.replace("29500", str(free_port())))
    done = run_trace("step.png", "--", sys.executable, "forty.py", cwd=tmp_path)
    assert done.returncode == 0 and "to_here:   a copy, which has counted to 2" in done.stdout
    assert re.search(r"worker0 -> worker1: increment +2 +[\d.]+ +[\d.]+ +[\d.]+\n", done.stderr), done.stderr
    assert "trace" not in done.stdout
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["forty.py", "step.png"]


def test_the_calls_of_a_killed_rank_are_in_the_file(tmp_path, pair, capsys):
    """A recording is bounded, here to 24 kB. The other rank leaves."""
    copy = with_files_of(tmp_path, 8192, 24_576)
    done = run_script(copy, "--into", tmp_path / "calls", "--", sys.executable, *pair, "killed", "worker0")
    assert done.returncode == 7, done.stderr
    assert [path.stat().st_size for path in (tmp_path / "calls").rglob("*.jsonl")] == [24_576] * 2
    assert [process["limit"] for process in read.read(tmp_path / "calls", most=0)] == [60.0] * 2, "of calls, by default"
    said = drawn(tmp_path / "all.json", tmp_path / "calls", capsys)
    kept = re.findall(r"worker(\d) made too many calls; the first (\d+) bars are kept", said)
    assert [rank for rank, _ in kept] == ["0", "1"] and all(40 <= int(count) <= 200 for _, count in kept), said
    events = events_in(tmp_path / "all.json")
    (first,) = bars(events, "async", "never (unfinished)")
    assert names_of(events)[first["pid"]] == "worker1" and bars(events, "run", "never (unfinished)")
    assert max(bar["ts"] for bar in bars(events, "sync", "increment")) > first["ts"]
    assert re.search(r"worker1 -> worker0: never +1 +1 without a recorded answer\n", said), said


def test_ranks_in_terminals_record_into_one_folder_and_one_that_is_not_recorded_works_with_them(tmp_path, pair, capsys):
    """Rank 0 is not recorded."""
    plain = [*pair, "short", "worker0", "worker2"]
    recorded = ("tools/rpctrace", "--into", tmp_path / "calls", "--", sys.executable, *plain)
    with Program(*plain, env={"RANK": 0}) as rank0, Program(*recorded, env={"RANK": 2}) as rank2:
        rank1 = run_script(*recorded, env={"RANK": 1})
        assert (rank1.returncode, rank1.stdout) == (0, "rank 1 is done\n"), rank1.stderr
        assert (rank0.wait(60), rank2.wait(60)) == (0, 0), rank0.text() + rank2.text()
    assert all(one["left"] for one in read.read(tmp_path / "calls", most=0))
    (tmp_path / "calls" / "data.jsonl").write_text("[1]\n")  # a user's file
    said = drawn(tmp_path / "all.json", tmp_path / "calls", capsys)
    assert re.search("worker1 -> worker2: increment +5( +[0-9.]+){3}\n", said), said
    assert re.search("worker1 -> worker0: increment +5   5 without a recorded answer\n", said), said
    events = [event for event in events_in(tmp_path / "all.json") if event.get("args", {}).get("to") != "worker0"]
    assert calls_of(events) == {("worker1", "worker2", "increment"): 5}


# ---------------------------------------------------------------------------- the program is as it is without the tool


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (["t.svg", "--", "true"], 2, "must end in .png or .json"),
        (["no/such/folder/t.json", "--", "true"], 2, "its folder is missing"),
        (["t.json", "no/such/folder"], 2, "there is no such folder"),
        (["why", "--dump", "/proc"], 2, "or it is one itself"),
        (["why", "FILE", "--store", "localhost:29500"], 2, "together with --dump"),
        (["--into", "/proc/here", "--", "true"], 2, "--into /proc/here: No such file or directory"),
        (["--end", "t.json", "--", "true"], 2, "give FILE"),
        (["--into", "x", "--stalled", "0", "--", "true"], 2, "--stalled 0.0: give a number of seconds"),
        (["--into", "x", "t.json", "--", "true"], 2, "give FILE"),
        (["t.json", "--", "no-such-command"], 127, "rpctrace: no-such-command: No such file or directory"),
        (["t.json", "--", "/etc/passwd"], 126, "rpctrace: /etc/passwd: Permission denied"),
    ],
)
def test_wrong_command_lines_are_refused(words, status, why, capsys):
    with pytest.raises(SystemExit) as refused:
        cli.main(words)
    assert refused.value.code == status and why in capsys.readouterr().err


def test_a_program_without_rpc_ends_as_it_does_without_being_recorded(tmp_path):
    """It has a sitecustomize of its own, and is killed. The status is that of a shell."""
    mine = tmp_path / "sitecustomize.py"
    mine.write_text("print('customized', __name__, __file__)")
    code = "import os, sys, sitecustomize\n"
    code += "print(sitecustomize.__file__, [p for p in sys.path if 'record' in p], flush=True)\nos.kill(os.getpid(), 9)"
    done = run_trace(tmp_path / "t.json", "--", sys.executable, "-c", code, env={"PYTHONPATH": tmp_path})
    assert done.returncode == 128 + signal.SIGKILL and "nothing was recorded: no process of the command" in done.stderr
    # The tool is a Python process as well.
    assert sorted(done.stdout.splitlines()) == [f"{mine} []", *[f"customized sitecustomize {mine}"] * 2]


# A torch with other functions than those that are replaced.
FAKE_TORCH = {
    "torch/__init__.py": "__version__ = '99'\nclass _C:\n    class Future: pass",
    "torch/autograd/__init__.py": "",
    "torch/autograd/profiler.py": """
class record_function:
    def __init__(self, name):
        self.name = name
    def __enter__(self):
        pass
    def __exit__(self, *_):
        pass
""",
    "torch/distributed/__init__.py": "",
    "torch/distributed/optim.py": "",
    "program.py": """
import os
import torch.autograd.profiler, torch.distributed.rpc, torch.distributed.optim
print("ran on with torch", torch.__version__, *getattr(torch.distributed.rpc, "made", []))
os.closerange(3, 256)
with open("mine", "w") as mine:
    for _ in range(100):
        with torch.autograd.profiler.record_function("step"):
            pass
    mine.write("mine")
""",
}
OTHER_PARAMETERS = """
class api:
    def _enable_rpc_profiler(should_profile, qualified_name, func, rpc_type, dst_worker_info, deadline):
        return deadline
made = [api._enable_rpc_profiler(1, 2, 3, 4, 5, 6)]
"""


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rpc", "why"),
    [
        ("", "torch 99: there is no torch.distributed.rpc.api._enable_rpc_profiler"),
        (OTHER_PARAMETERS, "torch 99: torch.distributed.rpc.api._enable_rpc_profiler has other parameters"),
    ],
)
def test_a_program_with_another_torch_runs_on_and_closes_all_descriptors(rpc, why, tmp_path):
    """Its own file gets no lines of the recording, which goes on in further pieces, and is not closed by it."""
    for name, text in (FAKE_TORCH | {"torch/distributed/rpc.py": rpc}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    copy = with_files_of(tmp_path, 4096, 1 << 20)
    done = run_script(copy, "--into", "calls", "--", sys.executable, "program.py", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("ran on with torch 99"), done.stderr
    assert done.stderr == f"rpctrace: not recorded: {why}\n" and ("6" in done.stdout or not rpc)
    assert (tmp_path / "mine").read_text() == "mine"
    (recorded,) = (tmp_path / "calls").rglob("*.jsonl")
    assert recorded.stat().st_size > 4096 and '"step 100"' in recorded.read_text()


# One process, alone in its group, calls something without a name. Two others make calls that are not sent, that time
# out, and whose callee dies.
AWKWARD = """
import multiprocessing, os, signal, sys, threading, time
import torch
import torch.distributed.rpc as rpc

class Raises:
    @property
    def __name__(self):
        raise RuntimeError("not loaded yet")
    def __call__(self, a, b):
        return a + b

def double(x):
    return 2 * x

def slow(seconds):
    time.sleep(seconds)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def fails(function, *args, **how):
    try:
        rpc.rpc_sync("second", function, args=args, **how)
    except Exception as error:
        return True

def alone(store):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}-one")
    rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=options)
    print("sum", rpc.rpc_sync("one", Raises(), args=(1, 2)), flush=True)
    if not os.fork():  # a child of a worker has no name
        with torch.profiler.record_function("step"):
            os._exit(len(sys._current_frames()) - 1)
    assert os.wait()[1] == 0
    rpc.shutdown()

def pair(rank, store):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}-pair")
    rpc.init_rpc(("first", "second")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        assert rpc.rpc_sync("second", double, args=(2,)) == 4
        assert fails(double, threading.Lock()) and fails(slow, 0.8, timeout=0.3)
        time.sleep(0.7)
        assert fails(die)
        print("calls failed", flush=True)
        os._exit(0)
    rpc.shutdown()

if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    assert len(sys._current_frames()) == 1, "a thread of the recorder, before the ranks are forked"
    started = [fork.Process(target=alone, args=(sys.argv[1],))]
    started += [fork.Process(target=pair, args=(rank, sys.argv[1])) for rank in range(2)]
    for one in started:
        one.start()
    for one in started:
        one.join()
"""


def test_awkward_programs_run_as_without_the_tool(tmp_path):
    program = tmp_path / "awkward.py"
    program.write_text(AWKWARD)
    done = run_trace(tmp_path / "all.json", "--", sys.executable, program, tmp_path / "store")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert sorted(done.stdout.splitlines()) == ["calls failed", "sum 3"]
    for row in (
        r"first -> second: die +1   1 without a recorded answer",
        r"first -> second: slow +1   1 without a recorded answer",
        r"first -> second: double +1 +[\d.]+ +[\d.]+ +[\d.]+",
        r"one -> one: Raises +1 +[\d.]+ +[\d.]+ +[\d.]+",
    ):
        assert re.search(row + "\n", done.stderr), (row, done.stderr)
    assert re.search(r"^process \d+$", "\n".join(names_of(events_in(tmp_path / "all.json")).values()), re.MULTILINE)


@pytest.mark.quick
def test_more_calls_than_lanes_do_not_collide():
    """4,000 calls in flight at the same time, and then as many one after the other."""
    calls = [{"ph": "X", "pid": 0, "tid": 1, "cat": "async", "name": "f", "ts": n, "dur": 5_000} for n in range(4_000)]
    calls += [{**call, "ts": 10_000 + 10 * n, "dur": 5} for n, call in enumerate(calls)]
    events = draw.lay_out([{"name": "worker0", "main": 1}], [dict(call) for call in calls])
    lanes = collections.Counter(event["tid"] for event in events if event["ph"] == "X")
    assert len(lanes) == 4_000 and sum(event["name"] == "thread_name" for event in events) == 4_000
    assert max(lanes.values()) == 4_001


SIGNALLED = """
import signal, sys
SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
print("ignored:", [n.name for n in sorted(SIGNALS) if signal.getsignal(n) == signal.SIG_IGN], flush=True)
while (number := signal.sigwait(SIGNALS)) != signal.SIGUSR1:
    print(signal.Signals(number).name, flush=True)
sys.exit(7)
"""


def test_the_command_starts_with_the_signals_of_the_tool_and_gets_sigterm_and_sighup(tmp_path):
    """SIGINT is ignored at first, as in the background of a shell script. A program may wait for it nevertheless."""
    (tmp_path / "program.py").write_text(SIGNALLED)
    command = ("tools/rpctrace", tmp_path / "t.json", "--", sys.executable, tmp_path / "program.py")
    with Program(*command, by=["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable]) as on:
        assert on.wait_for_text(r"ignored: \['SIGINT'\]"), on.text()
        for number in (signal.SIGHUP, signal.SIGTERM):
            on.send_signal(number)
            assert on.wait_for_text(f"{number.name}\n")
        os.killpg(on.pid, signal.SIGINT)
        assert on.wait_for_text("SIGINT\n")
        (program,) = [pid for pid in on.members() if pid != on.pid]
        os.kill(program, signal.SIGUSR1)
        assert on.wait(20) == 7, on.text()


def test_an_interrupted_job_leaves_its_picture(tmp_path):
    command = [sys.executable, ROOT / "rl_rpc" / "main.py", "--world_size", 2, *JOBS["rl_rpc"]["long"]]
    with Program("tools/rpctrace", tmp_path / "step.png", "--", *command) as program:
        assert program.wait_for_text("Episode 10", 60)
        os.killpg(program.pid, signal.SIGINT)  # as a terminal sends Ctrl-C
        assert program.wait(20) in (130, -signal.SIGINT), program.text()
        assert "RPCs, median milliseconds" in program.errors(), program.errors()
    picture = tmp_path / "step.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and 2_000 < picture.stat().st_size < 500_000


def test_a_program_runs_on_when_the_disk_is_full(tmp_path, pair):
    """The disk counts as full for the file of rank 1 only."""
    copy = with_files_of(tmp_path, 20_480, 1 << 30)
    done = run_script(copy, tmp_path / "all.json", "--", sys.executable, *pair, "full", "worker0")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 is done", "rank 1 is done"]
    assert len(re.findall(r"rpctrace: process \d+ is not recorded any more: File too large\n", done.stderr)) == 1
    events = events_in(tmp_path / "all.json")
    assert 20 < len([bar for bar in events if bar["name"].startswith("increment") and bar["cat"] == "sync"]) < 200
    assert len(bars(events, "run", "increment")) == 1000


def test_torchs_own_tests_have_the_same_results_with_and_without_the_tool():
    done = run_script("tools/torch_rpc_tests.py", "--every", 90, timeout=240)
    assert done.returncode == 0, done.stdout
