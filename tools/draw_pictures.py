"""Draw the pictures of the READMEs: timelines of the modes, learning curves, several seeds, and the moving picture.

    python tools/draw_pictures.py curve run.json p.png   # the curves of a run of any package, from its --summary_json
    python tools/draw_pictures.py timelines rl_rpc       # pictures/timelines*.png of this package
    python tools/draw_pictures.py seeds                  # rl_rpc/pictures/seeds.png, with seeds 1 to 5
    python tools/draw_pictures.py moving                 # rl_rpc/pictures/moving.gif, at the top of the README

The pictures show times, so nothing else should run on the machine.
"""

import collections
import functools
import io
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw, ImageFont

ROOT = pathlib.Path(__file__).resolve().parent.parent
RPCTRACE = ROOT / "tools" / "rpctrace"
sys.path.append(str(RPCTRACE))
import draw  # noqa: E402
import read  # noqa: E402

EPISODE = re.compile(r"^Episode (\d+)\t.*Average reward: ([\d.]+)$", re.MULTILINE)
# Package -> (flags of all runs, pictures). A picture is (file name, {title: flags of the mode}, the number of the step
# that is shown, how many milliseconds are shown from its start on).
TIMELINES = {
    "rl_rpc": (
        ["--world_size", "3", "--max_episodes", "40", "--eval_episodes", "0"],
        [
            ("timelines", {mode: ["--mode", mode] for mode in ("step", "packed", "batched")}, 35, 10),
            ("timelines_rollout", {mode: ["--mode", mode] for mode in ("rollout", "async")}, 35, 8.0),
        ],
    ),
    "rnn_rpc": (
        ["--world_size", "2", "--epochs", "1", "--corpus_tokens", "40000", "--vocabulary", "10000"],
        [("timelines", {mode: ["--mode", mode] for mode in ("logits", "loss", "overlap")}, 26, 150.0)],
    ),
    "ddp_rpc": (
        ["--world_size", "4", "--epochs", "2", "--batches", "30"],
        [("timelines", {mode: ["--mode", mode] for mode in ("hogwild", "sync", "pipelined")}, 20, 10.0)],
    ),
    "param_server": (
        ["--world_size", "3", "--dataset", "synthetic", "--max_batches", "30"],
        [
            (
                "timelines",
                {
                    "remote": ["--mode", "remote"],
                    "replica": ["--mode", "replica"],
                    "overlap": ["--mode", "overlap"],
                    "sync": ["--mode", "sync"],
                },
                16,
                150.0,
            )
        ],
    ),
}
SOLVED = 475  # CartPole's reward threshold
# Sizes of the moving picture in pixels.
WIDTH = 830  # the width at which a README is shown
STRIP = 150  # the height of the part above the timelines
POLE = (300, 100)  # the size of one CartPole
DPI = 130  # of the timelines, whose letters are 7 points high
# The moving picture begins with this episode. It is too short to compare speeds, which are in docs/results/rl_rpc.md.
# A millisecond of the traces takes a second.
EPISODE_SHOWN = 39
FRAMES_PER_SECOND = 20
MILLISECONDS = 8.0
STILL_SECONDS = 2  # at the end, when the timelines are complete


def run(package, *flags):
    command = [sys.executable, str(ROOT / package / "main.py"), *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def draw_timelines(package):
    """Draw the pictures of a package. Each has a panel for each mode, all with the same time scale."""
    common, pictures = TIMELINES[package]
    for name, modes, step, milliseconds in pictures:
        traces = {title: traced(package, *common, *flags) for title, flags in modes.items()}
        draw_panels(ROOT / package / "pictures" / f"{name}.png", traces, step, milliseconds)


def draw_panels(path, traces, step, milliseconds):
    """Draw so many milliseconds of each of `traces`, {title: events}, from the start of this step on."""
    # A README is 830 pixels wide, in which the browser shrinks these 1650. So letters of 7 points are 11 pixels high.
    figure = Figure((7.5, 1), layout="constrained")
    panels = figure.subplots(len(traces), sharex=True, squeeze=False)[:, 0]
    for axes, (title, events) in zip(panels, traces.items(), strict=True):
        draw_panel(axes, events, step, milliseconds)
        axes.set_title(title, loc="left", fontsize=9)
    fit_heights(figure, panels, 0.22, 0.4 * len(panels) + 0.7)
    panels[-1].set_xlabel("milliseconds", fontsize=8)
    figure.legend(handles=draw.legend(), loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=220)
    with Image.open(path) as picture:
        picture.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def draw_panel(axes, events, step, milliseconds):
    start = start_of_step(events, step)
    draw.draw_period(axes, events, start, start + 1e3 * milliseconds)


def fit_heights(figure, panels, lane, rest):
    """Give each panel a height for its lanes. In inches: the height of a lane, and of the rest of the figure."""
    lanes = [len(axes.get_yticks()) for axes in panels]
    panels[0].get_gridspec().set_height_ratios(lanes)
    figure.set_figheight(lane * sum(lanes) + rest)


def start_of_step(events, step):
    return next(event["ts"] for event in events if event.get("cat") == "step" and event["name"] == f"step {step}")


def traced(package, *flags):
    """Run a package under rpctrace; return the events that it has recorded."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "trace.json")
        command = [sys.executable, str(ROOT / package / "main.py"), *flags]
        subprocess.run([sys.executable, str(RPCTRACE), str(path), "--", *command], check=True, capture_output=True)
        return json.loads(path.read_text())["traceEvents"]


def draw_seeds():
    """Draw the running average of the reward of each of five seeds as a thin line, and their median as a thick one."""
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
    longest = max(map(len, curves))  # a run that has ended keeps its last value
    median = [statistics.median(curve[min(at, len(curve) - 1)] for curve in curves) for at in range(longest)]
    axes.plot(range(1, longest + 1), median, color="tab:blue", linewidth=2, label="median of five")
    axes.axhline(475, linestyle="--", color="gray", linewidth=1, label="solved (475)")
    axes.set(xlabel="episode", ylabel="running average of the reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(ROOT / "rl_rpc" / "pictures" / "seeds.png", dpi=110)


# -------------------------------------------------------------------------------------------- the moving picture


def draw_moving():
    """Draw CartPole before and after learning, and below it the timelines of modes `step` and `rollout`."""
    common, _ = TIMELINES["rl_rpc"]
    sys.path.insert(0, str(ROOT / "rl_rpc"))
    traces = {mode: traced("rl_rpc", *common, "--mode", mode) for mode in ("step", "rollout")}
    sheet, panels = draw_sheet(traces, EPISODE_SHOWN)
    counts = [times_of_steps(traces, mode, EPISODE_SHOWN) for mode in traces]
    pictures = []
    for number, strip in enumerate(draw_strips(round(FRAMES_PER_SECOND * (MILLISECONDS + STILL_SECONDS)))):
        picture = Image.new("RGB", (WIDTH, STRIP + sheet.height), "white")
        picture.paste(strip, (0, 0))
        picture.paste(sheet_until(sheet, panels, counts, number / FRAMES_PER_SECOND), (0, STRIP))
        pictures.append(picture)
    save_gif(ROOT / "rl_rpc" / "pictures" / "moving.gif", pictures)


def save_gif(path, pictures):
    """Write an animation with its 64 most frequent colors, leaving out colors that are close to a more frequent one."""
    seen = collections.Counter()
    for picture in pictures[:: FRAMES_PER_SECOND // 2]:
        seen.update({color: count for count, color in picture.getcolors(1 << 20)})
    colors = []
    for color, _ in seen.most_common():
        if len(colors) < 64 and all(
            sum(abs(a - b) for a, b in zip(color, other, strict=True)) > 24 for other in colors
        ):
            colors.append(color)
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for color in colors for value in color])
    pictures = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=1000 // FRAMES_PER_SECOND, loop=0)
    print(f"{path.name}: {pictures[0].size}, {len(pictures)} frames, {path.stat().st_size / 1e3:.0f} kB")


# The upper part: two CartPoles, and the meaning of the colors.


def draw_strips(frames):
    """Return so many pictures of two CartPoles: one with the untrained policy, and one with the trained policy."""
    import torch

    import play
    from environment import make_env, sizes
    from glue.seeds import seed_for
    from policy import Policy

    torch.manual_seed(seed_for(1, 0))  # like the agent
    untrained = Policy(*sizes(make_env("CartPole-v1")))
    with tempfile.TemporaryDirectory() as folder:
        saved = str(pathlib.Path(folder, "policy.pt"))
        flags = ["--mode", "rollout", "--world_size", "3", "--seed", "1", "--eval_episodes", "0", "--log_interval", "1"]
        out = run("rl_rpc", *flags, "--save", saved)
        trained, _ = play.load_policy(saved)
    episodes, _ = EPISODE.findall(out)[-1]
    both = zip(play_on(untrained), play_on(trained), strict=True)
    return [
        draw_strip({"CartPole before learning": before, f"and after {episodes} episodes": after})
        for before, after in itertools.islice(both, frames)
    ]


def play_on(policy):
    """Play episodes without end; yield (picture, text below it) for each environment step.

    The last picture of an episode is repeated for half a second.
    """
    import play
    from actor import Actor
    from environment import make_env
    from glue.seeds import seed_for

    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # the renderer needs no screen
    env = make_env("CartPole-v1", render_mode="rgb_array")
    choose = Actor(policy).act_greedily
    for episode in itertools.count():
        poles = []
        draw = functools.partial(draw_pole, env, poles)
        play.play_episode(env, choose, seed_for(1, "play", episode), on_step=draw)
        draw()  # the state after the last step
        for step, pole in enumerate(poles):
            yield pole, f"{step} steps"
        for _ in range(FRAMES_PER_SECOND // 2):
            yield poles[-1], f"over after {len(poles) - 1} steps"


def draw_pole(env, poles):
    poles.append(Image.fromarray(env.render()).crop((0, 150, 600, 350)).resize(POLE))


def draw_strip(shown):
    """Return one picture with the CartPoles of `shown` side by side: {title: (picture, text below it)}."""
    strip = Image.new("RGB", (WIDTH, STRIP), "white")
    for number, (title, (pole, words)) in enumerate(shown.items()):
        left = number * (POLE[0] + 20)
        strip.paste(pole, (left, 22))
        write(strip, (left + POLE[0] // 2, 2), title, "ma", bold=True)
        write(strip, (left + POLE[0] // 2, POLE[1] + 22), words, "ma")
    for number, state in enumerate(("working", "waiting")):
        top = 50 + 24 * number
        ImageDraw.Draw(strip).rectangle((WIDTH - 120, top, WIDTH - 100, top + 14), fill=draw.COLORS[state])
        write(strip, (WIDTH - 90, top - 1), state, "la")
    return strip


def write(picture, place, text, anchor, bold=False):
    """Write a text into a picture. `anchor`: PIL's code for the point of the text that is at `place`."""
    font = ImageFont.truetype(findfont("DejaVu Sans:bold" if bold else "DejaVu Sans"), 14)
    ImageDraw.Draw(picture).text(place, text, "black", font, anchor)


# The lower part: the timelines. They are drawn once, and each frame shows them up to its time.


def draw_sheet(traces, step):
    """Return (a picture of two timelines, [(left, top, right, bottom) of each of them])."""
    titles = {
        "step": "Mode step: a call to the agent for each action",
        "rollout": "Mode rollout: a call to an observer for each episode",
    }
    figure = Figure((WIDTH / DPI, 1), dpi=DPI, layout="constrained")
    panels = figure.subplots(2, sharex=True)
    for axes, mode in zip(panels, titles, strict=True):
        draw_panel(axes, traces[mode], step, MILLISECONDS)
        axes.set_title(titles[mode], loc="left", fontsize=7.8, fontweight="bold")
        for name in axes.texts:
            if name.get_text():  # arrows are texts without letters
                name.set_text(name.get_text().replace("step ", "episode "))
    fit_heights(figure, panels, 0.19, 1)
    panels[-1].set_xlabel("milliseconds (each takes a second here)", fontsize=7)
    file = io.BytesIO()
    figure.savefig(file)
    sheet = Image.open(file).convert("RGB")
    boxes = [axes.get_window_extent() for axes in panels]
    return sheet, [tuple(map(round, (b.x0, sheet.height - b.y1, b.x1, sheet.height - b.y0))) for b in boxes]


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


def sheet_until(sheet, panels, counts, milliseconds):
    """Return the picture of the timelines up to this time, with the number of environment steps played so far."""
    picture = sheet.copy()
    draw = ImageDraw.Draw(picture)
    shown = min(milliseconds, MILLISECONDS)
    for (left, top, right, bottom), times in zip(panels, counts, strict=True):
        now = left + round(shown / MILLISECONDS * (right - left))
        draw.rectangle((now, top + 2, WIDTH, bottom - 2), fill="white")
        draw.line((right, top, right, bottom), fill="black")
        draw.line((now, top + 2, now, bottom - 2), fill="firebrick", width=2)
        played = sum(time <= shown for time in times)
        write(picture, (right, top - 11), f"environment steps: {played}", "rs", bold=True)
    return picture


# Package -> (what the horizontal axis counts, {label of a vertical axis: {curve: its text}}, label and key of a bound).
CURVES = {
    "rl_rpc": (
        "episode",
        {"reward of the lowest observer": {"reward/last": "one episode", "reward/running": "running average"}},
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
            axes.plot(*run["curves"].get(name, ([], [])), label=words, linewidth=1.2, marker=".")
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
    elif sys.argv[1:] == ["seeds"]:
        draw_seeds()
    elif sys.argv[1:] == ["moving"]:
        draw_moving()
    elif len(sys.argv) == 3 and sys.argv[1] == "timelines" and sys.argv[2] in TIMELINES:
        draw_timelines(sys.argv[2])
    else:
        sys.exit(__doc__)
