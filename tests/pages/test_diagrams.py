"""The diagrams of the READMEs agree with traced runs."""

import collections
import json
import re
import statistics
import sys

import pytest

from helpers import PACKAGES, ROOT, load_oracle
from jobs import JOBS
from pages import Page
from programs import run_script

CALL = re.compile(r"^ *(\w+)->>(\w+): (\w+)", re.MULTILINE)


def as_pattern(diagram):
    """Return a regular expression of the calls in a mermaid sequence diagram, each written as "caller>callee:name;"."""
    pattern, ends = "", []
    for line in map(str.strip, diagram.splitlines()):
        if call := CALL.match(line):
            pattern += re.escape("{}>{}:{};".format(*call.groups()))
        elif line.startswith(("loop ", "opt ")):
            pattern += "(?:"
            ends.append(")+" if line.startswith("loop") else ")?")
        elif line == "end":
            pattern += ends.pop()
        else:
            assert line.startswith(("sequenceDiagram", "%%", "Note ")) or re.match(r"\w+-->>\w+: ", line), line
    assert not ends
    return pattern


def assert_drawn(diagram, events):
    drawn = {name for caller, callee, _ in CALL.findall(diagram) for name in (caller, callee)}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    steps = [bar for bar in events if re.fullmatch(r"step \d+", bar["name"]) and names[bar["pid"]] in drawn]
    bars = sorted((bar for bar in events if "to" in bar.get("args", ())), key=lambda bar: bar["ts"])
    made = []
    for step in steps:
        within = [bar for bar in bars if step["ts"] <= bar["ts"] < step["ts"] + step["dur"]]
        calls = [(names[bar["pid"]], bar["args"]["to"], bar["name"].removeprefix("torch.optim.")) for bar in within]
        calls = [call for call in calls if {*call[:2]} <= drawn and not call[2].startswith("torch.")]
        made.append("".join("{}>{}:{};".format(*call) for call in calls))
    # The first and the last step of an epoch may be different, and in `replica` many are of the other trainer.
    usual = statistics.mode(each for each in made if each)
    assert re.fullmatch(as_pattern(diagram), usual), (as_pattern(diagram), made)


@pytest.mark.parametrize("package", [pytest.param("rl_rpc", marks=pytest.mark.xdist_group("rl_rpc")), *PACKAGES[1:]])
def test_the_diagrams_of_a_readme_are_what_runs_do(package, tmp_path, few_digits, rl_run):
    data = ("--dataset", "mnist", "--data_dir", few_digits) if package == "param_server" else ()
    for diagram in Page(f"{package}/README.md").blocks("mermaid", "sequenceDiagram"):
        flags = " ".join(re.findall(r"(?m)^ *%% main\.py(.*)$", diagram)).split()  # of its comment, if it has one
        if package == "rl_rpc":
            trace = rl_run(load_oracle(package).main.parse_args(flags).mode).trace
        else:
            trace, size = tmp_path / "trace.json", len(JOBS[package]["names"])
            job = [ROOT / package / "main.py", "--world_size", size, *JOBS[package]["short"], *flags, *data]
            done = run_script("tools/rpctrace", trace, "--", sys.executable, *job)
            assert done.returncode == 0, done.stderr
        events = json.loads(trace.read_text())["traceEvents"]
        assert_drawn(diagram, events)
        if package == "param_server" and not flags:
            assert_backward_optimizer_and_methods_have_bars(events)


def assert_backward_optimizer_and_methods_have_bars(events):
    kinds = collections.Counter((event.get("cat"), event["name"]) for event in events)
    steps = sum(count for (kind, _), count in kinds.items() if kind == "step")
    work = ("backward", "backward"), ("work", "optimizer step"), ("run", "forward")
    assert steps and [kinds[each] for each in work] == [steps] * 3
    assert kinds["run", "torch.optim._new_local_optimizer"] and not kinds["run", "call_method"]
