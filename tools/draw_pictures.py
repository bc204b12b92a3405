"""Draw the pictures of the READMEs: timelines of the modes, learning curves, and the moving picture.

    python tools/draw_pictures.py curve run.json p.png   # the curves of a run of any package, from its --summary_json
    python tools/draw_pictures.py timelines rl_rpc       # pictures/timelines*.png of this package
    python tools/draw_pictures.py moving                 # rl_rpc/pictures/moving.gif, at the top of the README

The pictures show times, so nothing else should run on the machine.
"""

import io
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

ROOT = pathlib.Path(__file__).resolve().parent.parent
RPCTRACE = ROOT / "tools" / "rpctrace"
sys.path.append(str(RPCTRACE))
import draw  # noqa: E402
import read  # noqa: E402

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
SOLVED = 475  # CartPole's reward threshold
# The moving picture begins with this episode. It is too short to compare speeds, which are in docs/results/rl_rpc.md.
EPISODE_SHOWN = 39
FRAMES_PER_SECOND = 20
MILLISECONDS = 16.0
MILLISECONDS_PER_SECOND = 2
STILL_SECONDS = 2  # at the end, when the timelines are complete


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
        draw_panel(axes, events, step, milliseconds)
        axes.set_title(title, loc="left", fontsize=9)
    lanes = [len(axes.get_yticks()) for axes in panels]
    panels[0].get_gridspec().set_height_ratios(lanes)
    figure.set_figheight(0.22 * sum(lanes) + 0.4 * len(panels) + 0.7)  # inches
    panels[-1].set_xlabel("milliseconds", fontsize=8)
    figure.legend(handles=draw.legend(figure), loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=220)
    with Image.open(path) as picture:
        picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def draw_panel(axes, events, step, milliseconds):
    start = start_of_step(events, step)
    draw.draw_period(axes, events, start, start + 1e3 * milliseconds)


def start_of_step(events, step):
    return next(event["ts"] for event in events if event.get("cat") == "step" and event["name"] == f"step {step}")


def traced(package, *flags):
    """Run a package under rpctrace; return the events that it has recorded."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        command = [sys.executable, str(ROOT / package / "main.py"), *flags]
        subprocess.run([sys.executable, str(RPCTRACE), str(path), "--", *command], check=True, capture_output=True)
        return json.loads(path.read_text())["traceEvents"]


# -------------------------------------------------------------------------------------------- the moving picture


def draw_moving():
    """Draw CartPole before and after learning, and below it the timelines of modes `step` and `rollout`."""
    common, _ = TIMELINES["rl_rpc"]
    sys.path.insert(0, str(ROOT / "rl_rpc"))
    titles = {
        "step": "Mode step: a call to the agent for each action",
        "rollout": "Mode rollout: a call to an observer for each episode",
    }
    traces = {mode: traced("rl_rpc", *common, "--mode", mode) for mode in titles}
    figure = Figure((8.3, 5.6), dpi=100, layout="constrained")
    grid = [["before", "after", "colors"], ["step"] * 3, ["rollout"] * 3]
    places = figure.subplot_mosaic(grid, width_ratios=(3, 3, 1.3), height_ratios=(5, 6, 5))
    poles, panels = [places["before"], places["after"]], [places[mode] for mode in titles]
    moving = []  # of each panel: what covers the time to come, a line at the time that is shown, and the times of steps
    for axes, (mode, title) in zip(panels, titles.items(), strict=True):
        draw_panel(axes, traces[mode], EPISODE_SHOWN, MILLISECONDS)
        axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
        for name in axes.texts:
            name.set_text(name.get_text().replace("step ", "episode "))
        for spine in axes.spines.values():
            spine.set_zorder(6)
        bottom, top = axes.get_ylim()
        cover = Rectangle((0, bottom), MILLISECONDS, top - bottom, color="white", zorder=5, clip_on=False)
        line = axes.axvline(0, color="firebrick", linewidth=2, zorder=6)
        moving.append((axes, axes.add_patch(cover), line, times_of_steps(traces, mode, EPISODE_SHOWN)))
    panels[-1].set_xlabel("milliseconds (each takes half a second here)", fontsize=8)
    places["colors"].legend(handles=draw.legend(figure), loc="center", fontsize=9, frameon=False)
    places["colors"].set_axis_off()
    seconds = MILLISECONDS / MILLISECONDS_PER_SECOND + STILL_SECONDS
    frames = []
    for number, shown in enumerate(cartpoles(round(FRAMES_PER_SECOND * seconds))):
        for axes, (title, (pole, words)) in zip(poles, shown.items(), strict=True):
            axes.clear()
            axes.imshow(pole)
            axes.set(xticks=[], yticks=[], xlabel=words)
            axes.set_title(title, fontsize=10, fontweight="bold")
            axes.spines[:].set_visible(False)
        now = min(number / FRAMES_PER_SECOND * MILLISECONDS_PER_SECOND, MILLISECONDS)
        for axes, cover, line, times in moving:
            cover.set(x=now, width=1.1 * MILLISECONDS - now)
            line.set_xdata([now, now])
            played = sum(time <= now for time in times)
            axes.set_title(f"environment steps: {played}", loc="right", fontsize=9, fontweight="bold")
        file = io.BytesIO()
        figure.savefig(file)
        figure.set_layout_engine("none")  # what the first frame has laid out stays
        frames.append(Image.open(file).convert("RGB"))
    palette = frames[-1].quantize(128, method=Image.Quantize.MAXCOVERAGE)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    path = ROOT / "rl_rpc" / "pictures" / "moving.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=1000 // FRAMES_PER_SECOND, loop=0)


def cartpoles(frames):
    """Yield for each frame {title: (picture, text below it)} of the untrained policy and of the trained one."""
    import torch

    import play
    from environment import make_env, sizes
    from glue.seeds import seed_for
    from policy import Policy

    torch.manual_seed(seed_for(1, 0))  # like the agent
    untrained = Policy(*sizes(make_env("CartPole-v1")))
    with tempfile.TemporaryDirectory() as folder:
        saved, summary = pathlib.Path(folder, "policy.pt"), pathlib.Path(folder, "summary.json")
        flags = ["--mode", "rollout", "--seed", "1", "--eval_episodes", "0", "--save", saved, "--summary_json", summary]
        subprocess.run([sys.executable, ROOT / "rl_rpc" / "main.py", *flags], check=True, capture_output=True)
        trained, _ = play.load_policy(str(saved))
        after = f"and after {json.loads(summary.read_text())['episodes']} episodes"
    both = zip(play_on(untrained), play_on(trained), strict=True)
    for first, second in itertools.islice(both, frames):
        yield {"CartPole before learning": first, after: second}


def play_on(policy):
    """Play episodes without end; yield (picture, text below it) for each environment step.

    The last picture of an episode is repeated for half a second.
    """
    from actor import Actor
    from environment import make_env
    from glue.seeds import seed_for

    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # the renderer needs no screen
    env = make_env("CartPole-v1", render_mode="rgb_array")
    for episode in itertools.count():
        state, _ = env.reset(seed=seed_for(1, "play", episode))
        poles, done = [env.render()[150:350]], False
        while not done:
            state, _, terminated, truncated, _ = env.step(Actor(policy).act_greedily(state))
            poles.append(env.render()[150:350])
            done = terminated or truncated
        for step, pole in enumerate(poles):
            yield pole, f"{step} steps"
        for _ in range(FRAMES_PER_SECOND // 2):
            yield poles[-1], f"over after {len(poles) - 1} steps"


def times_of_steps(traces, mode, step):
    """Return, for each environment step, the milliseconds at which it ended; in `rollout`, at which its episode ended.

    Both modes play the same episodes, so their numbers of steps are counted in the calls of mode `step`.
    """
    start = start_of_step(traces[mode], step)
    reports = [bar for bar in traces["step"] if bar.get("cat") == "sync" and bar["name"] == "report_reward"]
    ends = []
    for called, bar in zip(episodes_of(traces["step"]), episodes_of(traces[mode]), strict=True):
        for report in reports:
            if report["pid"] == called["pid"] and called["ts"] <= report["ts"] < read.end_of(called):
                ends.append(read.end_of(report if mode == "step" else bar))
    return [(end - start) / 1e3 for end in ends if end > start]


def episodes_of(events):
    """Return the observers' bars of run_episode, sorted by observer and then by time."""
    bars = [event for event in events if event.get("cat") == "run" and event["name"] == "run_episode"]
    return sorted(bars, key=lambda bar: (bar["pid"], bar["ts"]))


# Package -> (what the horizontal axis counts, {label of a vertical axis: {curve: its text}}, label and key of a bound).
CURVES = {
    "rl_rpc": (
        "episode",
        {"reward of the lowest observer": {"reward/last": "one episode", "reward/running": "running reward"}},
        ("solved", None),
    ),
    "rnn_rpc": (
        "epoch",
        {"perplexity (words)": {"perplexity/train": "training text", "perplexity/heldout": "held-out text"}},
        ("floor", "floor_perplexity"),
    ),
    "ddp_rpc": (
        "epoch",
        {"accuracy on held-out bags (fraction)": {"heldout/accuracy": "the model"}},
        ("the teacher's own", "ceiling_accuracy"),
    ),
    "param_server": (
        "updates of the weights",
        {"loss (nats)": {"loss": "training, one batch"}, "accuracy (fraction)": {"test accuracy": "test images"}},
        ("", None),
    ),
}


def draw_curve(summary_path, picture_path):
    """Draw the curves of one run, with a dashed line for the bound that no model can pass."""
    run = json.loads(pathlib.Path(summary_path).read_text())
    xlabel, panels, (label, key) = CURVES[run["scenario"]]
    figure = Figure((7 if len(panels) == 1 else 5 * len(panels), 4), layout="constrained")
    for axes, (ylabel, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, words in curves.items():
            line = "" if words.endswith(("one batch", "one episode")) else "-"  # neighbours do not follow each other
            axes.plot(*run["curves"].get(name, ([], [])), label=words, linestyle=line, linewidth=1.2, marker=".")
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        bound = SOLVED if label == "solved" else run.get(key)
        if bound:
            axes.axhline(bound, linestyle="--", color="gray", label=f"{label} ({bound:.4g})")
        axes.legend()
    figure.suptitle(f"{run['scenario']}, mode {run['mode']}, world size {run['world_size']}", fontsize=11)
    figure.savefig(picture_path, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "curve":
        draw_curve(*sys.argv[2:])
    elif sys.argv[1:] == ["moving"]:
        draw_moving()
    elif len(sys.argv) == 3 and sys.argv[1] == "timelines" and sys.argv[2] in TIMELINES:
        draw_timelines(sys.argv[2])
    else:
        sys.exit(__doc__)
