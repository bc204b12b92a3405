"""Draw the pictures of the READMEs again: what each mode's steps look like on the wire, and all seeds of a result.

    python tests/tools/draw_pictures.py timelines rl_rpc       # or another package: its pictures/timelines.png
    python tests/tools/draw_pictures.py seeds                  # rl_rpc/pictures/seeds.png, of seeds 1 to 5

Needs a machine on which nothing else is at work: what is drawn are times.
"""

import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
EPISODE = re.compile(r"^Episode (\d+)\t.*Average reward: ([\d.]+)$", re.MULTILINE)
# Package -> its pictures of timelines: file, the modes in it by their titles, the step that is shown, and how many
# milliseconds from its start. And the flags of all its runs.
TIMELINES = {
    "rl_rpc": (
        ["--world_size", "3", "--max_episodes", "40", "--eval_episodes", "0"],
        [
            ("timelines", {mode: ["--mode", mode] for mode in ("step", "packed", "batched")}, 35, 3.5),
            ("timelines_rollout", {mode: ["--mode", mode] for mode in ("rollout", "async")}, 35, 8.0),
        ],
    ),
    "rnn_rpc": (
        ["--world_size", "2", "--epochs", "1", "--corpus_tokens", "40000", "--vocabulary", "10000"],
        [("timelines", {mode: ["--mode", mode] for mode in ("logits", "loss", "overlap")}, 20, 150.0)],
    ),
    "ddp_rpc": (
        ["--world_size", "4", "--epochs", "2", "--batches", "30"],
        [("timelines", {mode: ["--mode", mode] for mode in ("sync", "averaged", "pipelined")}, 20, 10.0)],
    ),
    "param_server": (
        ["--world_size", "3", "--dataset", "synthetic", "--max_batches", "30"],
        [
            (
                "timelines",
                {
                    "remote": ["--mode", "remote"],
                    "replica (asynchronous)": ["--mode", "replica"],
                    "replica --overlap": ["--mode", "replica", "--overlap"],
                    "replica --consistency sync": ["--mode", "replica", "--consistency", "sync"],
                },
                20,
                150.0,
            )
        ],
    ),
}


def run(package, *flags):
    command = [sys.executable, str(ROOT / package / "main.py"), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def draw_timelines(package):
    """Draw the pictures of a package: in each, one panel per mode, all at one time scale."""
    sys.path.insert(0, str(ROOT / package))
    from glue import timeline

    common, pictures = TIMELINES[package]
    for name, modes, step, milliseconds in pictures:
        traces = {}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "trace.json")
            for title, flags in modes.items():
                run(package, *common, *flags, "--trace", str(path))
                traces[title] = json.loads(path.read_text())["traceEvents"]
        with open(ROOT / package / "pictures" / f"{name}.png", "wb") as file:
            timeline.draw(file, "png", traces, (step, step), milliseconds)


def draw_seeds():
    """Draw the running reward of each of five seeds as a thin line, and their median."""
    figure = Figure((7, 4), layout="constrained")
    axes = figure.subplots()
    curves = []
    for seed in range(1, 6):
        text = run("rl_rpc", "--mode", "rollout", "--seed", str(seed), "--log_interval", "1", "--eval_episodes", "0")
        found = EPISODE.findall(text)
        episodes = [int(episode) for episode, _ in found]
        rewards = [float(reward) for _, reward in found]
        curves.append(rewards)
        axes.plot(episodes, rewards, color="tab:blue", linewidth=0.6, alpha=0.6, label=None if seed > 1 else "one seed")
    longest = max(map(len, curves))  # a run that has ended stays where it was
    median = [statistics.median(curve[min(at, len(curve) - 1)] for curve in curves) for at in range(longest)]
    axes.plot(range(1, longest + 1), median, color="tab:blue", linewidth=2, label="median of five")
    axes.axhline(475, linestyle="--", color="gray", linewidth=1, label="solved (475)")
    axes.set(xlabel="episode", ylabel="running average of the reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(ROOT / "rl_rpc" / "pictures" / "seeds.png", dpi=110)


if __name__ == "__main__":
    if sys.argv[1:] == ["seeds"]:
        draw_seeds()
    elif len(sys.argv) == 3 and sys.argv[1] == "timelines" and sys.argv[2] in TIMELINES:
        draw_timelines(sys.argv[2])
    else:
        sys.exit(__doc__)
