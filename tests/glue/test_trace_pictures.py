"""What READMEs draw by hand is what a traced run does; and what --plot draws can be read."""

import json
import re

import pytest

from helpers import PACKAGES, ROOT, load_module, package_on_path, run_main
from jobs import JOBS

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
            assert line.startswith(("sequenceDiagram", "Note ")) or re.match(r"\w+-->>\w+: ", line), line
    assert not ends
    return pattern


@pytest.mark.parametrize("package", [p if p == "rl_rpc" else pytest.param(p, marks=pytest.mark.slow) for p in PACKAGES])
def test_the_diagram_in_the_readme_is_what_a_run_does(package, tmp_path):
    (diagram,) = re.findall(r"```mermaid\n(.*?)```", (ROOT / package / "README.md").read_text(), re.DOTALL)
    drawn = {name for caller, callee, _ in CALL.findall(diagram) for name in (caller, callee)}
    done = run_main(package, *JOBS[package]["size"], *JOBS[package]["short"], "--trace", tmp_path / "trace.json")
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    step = next(bar for bar in events if bar["name"] == "step 5" and names[bar["pid"]] in drawn)
    bars = sorted((bar for bar in events if "to" in bar.get("args", ())), key=lambda bar: bar["ts"])
    within = [bar for bar in bars if step["ts"] <= bar["ts"] < step["ts"] + step["dur"]]
    calls = [(names[bar["pid"]], bar["args"]["to"], bar["name"].removeprefix("torch.optim.")) for bar in within]
    made = "".join(
        f"{caller}>{callee}:{name};"
        for caller, callee, name in calls
        if {caller, callee} <= drawn and not name.startswith("torch.")
    )
    assert re.fullmatch(as_pattern(diagram), made), (as_pattern(diagram), made)


def test_the_moving_picture_counts_the_environment_steps_that_were_played(tmp_path):
    pictures = load_module(ROOT / "tests" / "tools" / "draw_pictures.py")
    flags = ["--world_size", 3, "--max_episodes", 3, "--eval_episodes", 0]
    traces, played = {}, {}
    for mode in ("step", "rollout"):
        outputs = ["--trace", tmp_path / "trace.json", "--summary_json", tmp_path / "summary.json"]
        done = run_main("rl_rpc", "--mode", mode, *flags, *outputs)
        assert done.returncode == 0, done.stderr
        traces[mode] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        played[mode] = json.loads((tmp_path / "summary.json").read_text())["env_steps"]
    with package_on_path("rl_rpc"):
        times = {mode: pictures.times_of_steps(traces, mode, 1) for mode in traces}
    assert {mode: len(each) for mode, each in times.items()} == played
    assert len(set(times["step"])) == played["step"]  # one by one
    assert len(set(times["rollout"])) == 6  # at the end of each of two observers' three episodes


def test_a_plot_says_what_is_on_its_axes(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    plain = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), plain(self, *a, **k)))
    with package_on_path("param_server"):
        import main
        from glue import report

        args = main.parse_args(["--dataset", "synthetic", "--plot", str(tmp_path / "curve.png")])
        result = report.Report("param_server", args)
        for update in range(1, 4):
            result.scalar("loss", 1 / update, update)
        counts = ("staleness (updates)", {0: 5, 2: 1})
        result.close({"loss": "loss of a batch"}, "updates of the weights", "loss (nats)", ("floor", 0.1), counts)
    (figure,) = drawn
    curve, histogram = figure.axes
    assert (curve.get_xlabel(), curve.get_ylabel()) == ("updates of the weights", "loss (nats)")
    assert [text.get_text() for text in curve.get_legend().get_texts()] == ["loss of a batch", "floor (0.1)"]
    assert histogram.get_xlabel() == "staleness (updates)"
    assert [(bar.get_center()[0], bar.get_height()) for bar in histogram.patches] == [(0, 5), (2, 1)]
    for ticks in (curve.get_xticks(), histogram.get_xticks(), histogram.get_yticks()):
        assert all(float(tick).is_integer() for tick in ticks), ticks
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
