"""What READMEs draw by hand is what a traced run does; and what --plot draws can be read."""

import json
import re

import pytest

from helpers import PACKAGES, ROOT, package_on_path, run_main
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
        result.scalar("accuracy", 0.5, 3)
        plot = {"loss (nats)": {"loss": "one batch"}, "accuracy (fraction)": {"accuracy": "test images"}}
        result.close(plot, "updates of the weights", ("ceiling", 0.9), counts)
    (figure,) = drawn
    curve, accuracy, histogram = figure.axes
    assert (curve.get_xlabel(), curve.get_ylabel()) == ("updates of the weights", "loss (nats)")
    assert (accuracy.get_xlabel(), accuracy.get_ylabel()) == ("updates of the weights", "accuracy (fraction)")
    assert [text.get_text() for text in curve.get_legend().get_texts()] == ["one batch"]
    assert [text.get_text() for text in accuracy.get_legend().get_texts()] == ["test images", "ceiling (0.9)"]
    assert histogram.get_xlabel() == "staleness (updates)"
    assert [(bar.get_center()[0], bar.get_height()) for bar in histogram.patches] == [(0, 5), (2, 1)]
    for ticks in (curve.get_xticks(), histogram.get_xticks(), histogram.get_yticks()):
        assert all(float(tick).is_integer() for tick in ticks), ticks
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
