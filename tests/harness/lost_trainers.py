"""Cases of lost trainers, drawn from a number. They check the promise of `--on_lost continue` by counting images.

Used by test_lost_trainers.py and tools/soak_lost.py.
"""

import json
import random
import re
import tempfile

from helpers import NOISE
from programs import read_whole, run_script

REPLICA = ("--mode", "replica", "--consistency")
MODES = {
    "remote": ("--mode", "remote"),
    "async": (*REPLICA, "async"),
    "async, overlap": (*REPLICA, "async", "--overlap"),
    "async, two servers": (*REPLICA, "async", "--num_servers", 2),
    "async, local steps": (*REPLICA, "async", "--sync_every", 3),
    "bounded": (*REPLICA, "bounded", "--max_staleness", 2),
    "bounded, two servers": (*REPLICA, "bounded", "--max_staleness", 1, "--num_servers", 2),
    "sync": (*REPLICA, "sync"),
    "sync, three servers": (*REPLICA, "sync", "--num_servers", 3),
}
KINDS = ("SIGKILL", "SIGSTOP", "exception", "nap")
IMAGES, BATCH, TRAINERS, EPOCHS = 1200, 4, 4, 3


def draw_case(number):
    """Return one case, drawn from a seed: (mode, {trainer from 0: (kind, seconds since training began)})."""
    draw = random.Random(number)
    mode = list(MODES)[number % len(MODES)]
    victims = draw.sample(range(TRAINERS), draw.randint(1, TRAINERS - 1))
    return mode, {victim: (draw.choice(KINDS), round(draw.uniform(0.0, 1.5), 3)) for victim in victims}


def run_case(mode, faults, flags=(), lost_after=4.0, pause=0.004):
    """Run a case and check what it printed and counted; return the job's summary."""
    servers = 2 if "two" in mode else 3 if "three" in mode else 1
    spec = ",".join(f"{servers + victim}:{kind}:{at}" for victim, (kind, at) in faults.items())
    with tempfile.NamedTemporaryFile("r") as summary_file:
        job = (IMAGES, pause, lost_after, spec, "--world_size", servers + TRAINERS, "--epochs", EPOCHS, *MODES[mode])
        job = (*job, "--batch_size", BATCH, "--lr", BATCH, "--on_lost", "continue", "--log_interval", 1_000_000)
        done = run_script(
            "tests/jobs/param_server/counting_job.py", *job, "--summary_json", summary_file.name, *flags, timeout=100
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        summary = json.loads(read_whole(summary_file.name))
    # A trainer that raises an exception prints its traceback; the others print a line.
    assert len(re.findall(NOISE, output)) <= sum(kind == "exception" for kind, _ in faults.values()), output
    assert set(summary["lost"]) <= {servers + victim for victim in faults}, (summary, output)
    for rank in summary["lost"]:
        name = rf"rank {rank} \(trainer{rank - servers + 1}\)"
        line = rf"lost {name}: [^;]*(; batches of this epoch that go to the others: \d+)?$"
        assert re.search(line, output, re.M), output
        assert re.search(rf"The job finished without .*{name}", output), output
    assert summary["images_applied"] == [IMAGES] * EPOCHS, (summary, output)
    counted = re.findall(r"counted (\d+) never, min (\S+), max (\S+), memory (\S+)", output)
    assert len(counted) == EPOCHS, output
    uneven = re.findall(r"not once: (\d+), the first is (\d+)", output)
    for (never, fewest, most, _), (uneven_images, first) in zip(counted, uneven, strict=True):
        if servers > 1:  # a lost trainer may leave one push that only some servers have applied
            assert int(never) <= BATCH * len(summary["lost"]), output
            if "sync" not in mode:  # what counts is what the first server has applied
                assert int(uneven_images) <= BATCH * len(summary["lost"]), output
                assert int(first) >= IMAGES // servers, output
        elif "local" not in mode and "sync" not in mode:
            assert float(fewest) == float(most) == 1.0, output
        else:
            assert int(never) == 0, output
    memory = [float(each[3]) for each in counted]
    assert memory[-1] - memory[0] < 16, output  # memory of rank 0 in MB
    return summary
