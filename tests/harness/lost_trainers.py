"""Cases of lost trainers, drawn from a number. They check the promise of `--on_lost continue` by counting images.

Used by test_lost_trainers.py and tools/soak_lost.py.
"""

import json
import random
import re
import tempfile

from helpers import NOISE
from programs import read_whole, run_script

MODES = ("remote", "replica", "bounded", "sync", "overlap")
KINDS = ("SIGKILL", "SIGSTOP", "exception", "nap")
IMAGES, BATCH, TRAINERS, EPOCHS = 1200, 4, 4, 3


def draw_case(number):
    """Return one case, drawn from a seed: (mode, {trainer's rank: (kind, seconds since training began)})."""
    draw = random.Random(number)
    mode = MODES[number % len(MODES)]
    victims = draw.sample(range(1, TRAINERS + 1), draw.randint(1, TRAINERS - 1))
    return mode, {victim: (draw.choice(KINDS), round(draw.uniform(0.0, 1.5), 3)) for victim in victims}


def run_case(mode, faults, flags=(), lost_after=4.0, pause=0.004, trainers=TRAINERS, epochs=EPOCHS):
    """Run a case and check what it printed and counted; return the job's summary."""
    spec = ",".join(f"{rank}:{kind}:{at}" for rank, (kind, at) in faults.items())
    with tempfile.NamedTemporaryFile("r") as summary_file:
        job = (IMAGES, pause, lost_after, spec, "--mode", mode, "--world_size", trainers + 1, "--epochs", epochs)
        job = (*job, "--batch_size", BATCH, "--lr", BATCH, "--on_lost", "continue", "--log_interval", 1_000_000)
        job = (*job, "--max_staleness", 2) if mode == "bounded" else job
        done = run_script(
            "tests/jobs/param_server/counting_job.py", *job, "--summary_json", summary_file.name, *flags, timeout=100
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        summary = json.loads(read_whole(summary_file.name))
    # A trainer that raises an exception prints its traceback; the others print a line.
    assert len(re.findall(NOISE, output)) <= sum(kind == "exception" for kind, _ in faults.values()), output
    assert set(summary["lost"]) <= faults.keys(), (summary, output)
    for rank in summary["lost"]:
        name = rf"rank {rank} \(trainer{rank}\)"
        line = rf"lost {name}: [^;]*(; batches of this epoch that go to the others: \d+)?$"
        assert re.search(line, output, re.M), output
        assert re.search(rf"The job finished without .*{name}", output), output
    assert summary["images_applied"] == [IMAGES] * epochs, (summary, output)
    counted = re.findall(r"counted (\d+) never, min (\S+), max (\S+), memory (\S+)", output)
    assert len(counted) == epochs, output
    for never, fewest, most, _ in counted:
        if mode == "sync":  # the weight of an image depends on the number of gradients in its update
            assert int(never) == 0, output
        else:
            assert float(fewest) == float(most) == 1.0, output
    memory = [float(each[3]) for each in counted]
    assert memory[-1] - memory[0] < 16, output  # memory of rank 0 in MB
    return summary
