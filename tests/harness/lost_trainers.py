"""Cases of lost trainers. They check the promise of `--on_lost continue` by counting how often each image is applied.

The job is a copy of param_server with another network. It has one weight for each image, and the loss is minus the mean
of a batch's weights. So an image that is applied raises its own weight, and no other, by learning rate / batch size
(`sync`: divided by the number of gradients in the update). The final weights are the counts, which do not depend on
those that the program itself keeps.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time

import torch

from helpers import NOISE
from processes import ranks_of
from programs import ROOT, Program

MODES = ("replica", "bounded", "sync", "overlap")
IMAGES, BATCH, TRAINERS, EPOCHS = 1200, 4, 4, 3

COUNTING_NET = f"""
import time

import torch
from torch import nn

from data import MEAN, STD


class Net(nn.Module):
    def __init__(self, num_gpus=0):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros({IMAGES}))

    def forward(self, x):
        if self.training:
            time.sleep(PAUSE)
        first, second = (x.flatten(1)[:, :2] * 255 * STD + 255 * MEAN).round().long().T
        return self.weight[first + 256 * second].unsqueeze(1)  # (B, 1): of the label 0, nll_loss takes minus the mean
"""


def write_numbered_images(folder):
    """Write MNIST's four files. The first two pixels of an image are its number; all labels are 0."""
    folder.mkdir()
    for name, count in (("train", IMAGES), ("t10k", 500)):
        for kind, sizes in (("images-idx3", [count, 28, 28]), ("labels-idx1", [count])):
            head = bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes)
            images = b"".join(number.to_bytes(2, "little") + bytes(28 * 28 - 2) for number in range(count))
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + (images if len(sizes) == 3 else bytes(count)))


def draw_case(number):
    """Return one case, drawn from a seed: (mode, {trainer's rank: seconds after training began, when it is killed})."""
    draw = random.Random(number)
    mode = MODES[number % len(MODES)]
    victims = draw.sample(range(1, TRAINERS + 1), draw.randint(1, TRAINERS - 1))
    return mode, {victim: round(draw.uniform(0.0, 1.5), 3) for victim in victims}


def run_case(folder, mode, kills, flags=(), pause=0.004, trainers=TRAINERS):
    """Run a case in an empty folder, and check what it printed and counted; return the job's summary."""
    copy = folder / "param_server"
    shutil.copytree(ROOT / "param_server", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "net.py").write_text(COUNTING_NET.replace("PAUSE", str(pause)))
    write_numbered_images(folder / "images")
    job = ("--mode", mode, "--world_size", trainers + 1, "--epochs", EPOCHS, "--batch_size", BATCH, "--lr", BATCH)
    job = (*job, "--data_dir", folder / "images", "--on_lost", "continue", "--log_interval", 1_000_000, *flags)
    job = (*job, "--max_staleness", 2) if mode == "bounded" else job
    job = (*job, "--summary_json", folder / "summary.json", "--checkpoint", folder / "c.pt")
    with Program(copy / "main.py", *job, env={"PYTHONUNBUFFERED": "1"}) as running:
        assert running.wait_for_text(r"Rank \d+ training batch"), running.text()
        began, pids = time.monotonic(), ranks_of(running.pid, trainers + 1)
        for victim, at in sorted(kills.items(), key=lambda kill: kill[1]):
            time.sleep(max(0.0, began + at - time.monotonic()))  # the moment of this case
            with contextlib.suppress(ProcessLookupError):  # the job has ended already
                os.kill(pids[victim], signal.SIGKILL)
        done = running.result(100)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and not re.search(NOISE, output), output
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["lost"]) <= kills.keys(), (summary, output)
    for rank in summary["lost"]:
        assert re.search(rf"lost rank {rank} \(trainer{rank}\): killed by SIGKILL", done.stderr), output
        assert re.search(rf"The job finished without .*rank {rank} \(trainer{rank}\)", done.stdout), output
    assert summary["images_applied"] == [IMAGES] * EPOCHS, (summary, output)
    counts = torch.load(folder / "c.pt", weights_only=True)["state"]["model"]["weight"]
    if mode == "sync":  # the weight of an image depends on the number of gradients in its update
        assert counts.min() > 0, output
    else:
        assert counts.min() == counts.max() == EPOCHS, output
    return summary
