"""Cases of lost trainers. They check the promise of `--on_lost continue` by the list of updates in the summary.

Used by tests/jobs/param_server/test_lost_trainers.py and tools/soak_faults.py.
"""

import contextlib
import json
import os
import re
import signal
import time

from helpers import NOISE, noise, write_mnist
from processes import ranks_of
from programs import Program

MODES = ("replica", "bounded", "sync", "overlap")
TRAINERS, EPOCHS, BATCHES = 4, 3, 100


def run_case(folder, mode, kills, flags=(), trainers=TRAINERS):
    """Run a case in an empty folder, and check what it printed and applied; return the job's summary."""
    write_mnist(folder / "noise", noise(320), noise(64))
    job = ("--mode", mode, "--world_size", trainers + 1, "--epochs", EPOCHS, "--batch_size", 3, "--lr", 0.003)
    job = (*job, "--data_dir", folder / "noise", "--max_batches", BATCHES // trainers)
    job = (*job, "--on_lost", "continue", "--log_interval", 1_000_000, *flags)
    job = (*job, "--max_staleness", 2) if mode == "bounded" else job
    job = (*job, "--summary_json", folder / "summary.json")
    with Program("param_server/main.py", *job, env={"PYTHONUNBUFFERED": "1"}) as running:
        assert running.wait_for_text(r"Rank \d+ training batch", 120), running.text()
        began, pids = time.monotonic(), ranks_of(running.pid, trainers + 1)
        for victim, at in sorted(kills.items(), key=lambda kill: kill[1]):
            time.sleep(max(0.0, began + at - time.monotonic()))  # the moment of this case
            with contextlib.suppress(ProcessLookupError):  # the job has ended already
                os.kill(pids[victim], signal.SIGKILL)
        done = running.result(200)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and not re.search(NOISE, output), output
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["lost"]) <= kills.keys(), (summary, output)
    for rank in summary["lost"]:
        assert re.search(rf"lost rank {rank} \(trainer{rank}\): .*; the others go on", done.stderr), output
        assert re.search(rf"The job finished without .*rank {rank} \(trainer{rank}\)", done.stdout), output
    for epoch in range(EPOCHS):
        updates = [update for update in summary["update_list"] if update["epoch"] == epoch]
        batches = sorted(batch for update in updates for batch in update["batches"])
        assert batches == [*range(BATCHES // trainers * trainers)], (epoch, batches, output)
    return summary
