"""tools/plot.py draws the learning curves of one run or several."""

import json

import pytest
from matplotlib.figure import Figure

from helpers import load_module
from programs import ROOT, run_script

CURVE = [1, 2, 3], [9.0, 20.0, 31.0]
plot = load_module(ROOT / "tools" / "plot.py")


def summary(path, mode):
    curves = {"reward/last": CURVE, "reward/running": CURVE}
    run = {"scenario": "rl_rpc", "mode": mode, "world_size": 3, "reward_threshold": 475.0, "curves": curves}
    path.write_text(json.dumps(run))
    return run | {"file": path.name}


def test_runs_of_one_mode_are_told_apart_by_their_files(tmp_path):
    runs = [summary(tmp_path / name, "rollout") for name in ("a.json", "b.json")]
    axes = Figure().subplots()
    plot.draw(axes, runs, "episode", "reward", {"reward/running": "running reward"}, "solved", "reward_threshold", True)
    legend = axes.get_legend()
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["rollout, 3 ranks (a.json)", "rollout, 3 ranks (b.json)", "solved (475)"]
    assert legend.get_title().get_text() == "running reward"


def test_a_picture_is_drawn_of_whatever_runs_there_are(tmp_path):
    summary(tmp_path / "rl.json", "step")
    done = run_script("tools/plot.py", tmp_path / "curve.png", tmp_path / "rl.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content", [None, "no JSON", "[]", "{}", '{"scenario": "another"}'])
def test_what_is_no_summary_is_refused_in_one_line(content, tmp_path, capsys):
    if content:
        (tmp_path / "s.json").write_text(content)
    with pytest.raises(SystemExit) as refused:
        plot.main(tmp_path / "x.png", tmp_path / "s.json")
    (line,) = capsys.readouterr().err.splitlines()
    assert refused.value.code == 2
    assert "s.json is no file of --summary_json" in line
