"""Draw the timelines of the modes in the READMEs. (The learning curves are drawn by plot.py.)

    python tools/draw_pictures.py timelines rl_rpc       # pictures/timelines*.png of this package

The pictures show times, so nothing else should run on the machine.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from matplotlib.figure import Figure
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parent.parent
RPCTRACE = ROOT / "tools" / "rpctrace"
sys.path.append(str(RPCTRACE))
import draw  # noqa: E402

# Package -> (flags of all runs, pictures). A picture is (file name, modes, the number of the step that is shown, how
# many milliseconds are shown from its start on).
TIMELINES = {
    "rl_rpc": (
        ["--world_size", "3", "--max_episodes", "40", "--eval_episodes", "0"],
        [("timelines", ("step", "packed", "batched"), 35, 18), ("timelines_rollout", ("rollout", "async"), 35, 8)],
    ),
    "rnn_rpc": (
        ["--world_size", "2", "--epochs", "1", "--corpus_tokens", "40000", "--vocabulary", "10000"],
        [("timelines", ("logits", "loss", "overlap"), 26, 150)],
    ),
    "ddp_rpc": (
        ["--world_size", "4", "--epochs", "2", "--batches", "30"],
        [("timelines", ("hogwild", "sync", "pipelined"), 20, 16)],
    ),
    "param_server": (
        ["--world_size", "3", "--dataset", "synthetic", "--max_batches", "30"],
        [("timelines", ("remote", "replica", "overlap", "sync"), 16, 150)],
    ),
}


def draw_timelines(package):
    """Draw the pictures of a package. Each has a panel for each mode, all with the same time scale."""
    common, pictures = TIMELINES[package]
    for name, modes, step, milliseconds in pictures:
        traces = {mode: traced(package, *common, "--mode", mode) for mode in modes}
        draw_panels(ROOT / package / "pictures" / f"{name}.png", traces, step, milliseconds)


def draw_panels(path, traces, step, milliseconds):
    """Draw so many milliseconds of each of `traces`, {title: events}, from the start of this step on."""
    # A README is 830 pixels wide, in which the browser shrinks these 1650. So letters of 7 points are 11 pixels high.
    figure = Figure((7.5, 1), layout="constrained")
    panels = figure.subplots(len(traces), sharex=True, squeeze=False)[:, 0]
    for axes, (title, events) in zip(panels, traces.items(), strict=True):
        start = next(event["ts"] for event in events if (event.get("cat"), event["name"]) == ("step", f"step {step}"))
        draw.draw_period(axes, events, start, start + 1e3 * milliseconds)
        axes.set_title(title, loc="left", fontsize=9)
    lanes = [len(axes.get_yticks()) for axes in panels]
    panels[0].get_gridspec().set_height_ratios(lanes)
    figure.set_figheight(0.22 * sum(lanes) + 0.4 * len(panels) + 0.7)  # inches
    panels[-1].set_xlabel("milliseconds", fontsize=8)
    figure.legend(handles=draw.legend(), loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=220)
    with Image.open(path) as picture:
        picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def traced(package, *flags):
    """Run a package under rpctrace; return the events that it has recorded."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        command = [sys.executable, str(ROOT / package / "main.py"), *flags]
        subprocess.run([sys.executable, str(RPCTRACE), str(path), "--", *command], check=True, capture_output=True)
        return json.loads(path.read_text())["traceEvents"]


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "timelines" and sys.argv[2] in TIMELINES:
        draw_timelines(sys.argv[2])
    else:
        sys.exit(__doc__)
