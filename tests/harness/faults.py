"""Faults in jobs: ranks are killed at some moment. tools/soak_faults.py draws such cases.

run_case checks what docs/RUNNING.md promises of a job whose rank is killed, and lose_trainers what it promises of
`--on_lost continue`.
"""

import contextlib
import json
import os
import re
import signal
import time

from helpers import NOISE, noise, write_mnist
from jobs import JOBS, RunningJob
from processes import command_of, ranks_of, wait_until
from programs import Program

EPOCHS, BATCHES = 3, 100  # of lose_trainers
JOIN_TIMEOUT = 20  # seconds
# If the rank dies before it has joined, the others wait for it until --join_timeout, which they count from their own
# start. Starting takes long on a busy machine.
ALL_HAVE_ENDED_AFTER = {"start": 60, "training": 15, "end": 15}  # seconds


def run_case(package, way, rank, moment, seconds):
    """Start the job, kill one rank, check what follows; return after how many seconds the other ranks had ended."""
    facts = JOBS[package]
    flags = facts["short" if moment == "end" else "long"]
    with RunningJob(package, way, [*flags, "--join_timeout", JOIN_TIMEOUT]) as job:
        if moment != "start":
            job.wait_for_text(facts[{"training": "training", "end": "done"}[moment]], 90)
        pids = [job.pid_of(each) for each in range(len(facts["names"]))]
        time.sleep(seconds / 30 if moment == "end" else seconds)  # the random moment of this case
        return kill_and_check(job, rank, pids, moment)


def kill_and_check(job, rank, pids, moment="training"):
    """Kill a rank of a job, and check what follows; return after how many seconds the other ranks had ended.

    `pids`: the process ids of all ranks; at the "end" some may have ended already.
    """
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(pids[rank], signal.SIGKILL)
    killed_at = time.monotonic()
    others = [pid for number, pid in enumerate(pids) if pid and number != rank]
    wait_until(lambda: not any(map(command_of, others)), ALL_HAVE_ENDED_AFTER[moment], job.text)
    took = time.monotonic() - killed_at
    statuses, left = job.wait(45 if job.way == "torchrun" else 15), job.left_over()  # torchrun waits for 30 s
    assert not left, (left, job.text())
    if job.way == "terminals":
        del statuses[rank]
    # At the end the work may have been done already. Under torchrun the job then fails only if the rank was the last.
    assert set(statuses) == {1} or (moment == "end" and set(statuses) == {0}), (statuses, job.text())
    assert_named(job, rank, moment)
    return took


def assert_named(job, victim, moment="training"):
    """Assert that each console has one line that names a rank that was killed, and the status 1.

    At the "end" a rank may also have done its work. It prints nothing then, and its status is 0. At the "start" the
    victim may have died before it joined, as one that did not come: rank 0 names it, and so do those whose own
    --join_timeout has not passed.
    """
    name = rf"rank {victim} \({job.names[victim]}\)"
    missing = rf"{name}|the other ranks" + (r"|rank 0 at localhost port \d+" if victim == 0 else "")
    expected = f"lost {name}" + (f"|({missing}) did not come" if moment == "start" else "")
    of_torchrun = rf"\brank +: {victim} "  # it may end the others before they notice
    for process in job.processes:
        if process.returncode == -signal.SIGKILL or (moment == "end" and process.returncode == 0):
            continue
        # torchrun's own report has a traceback.
        assert job.way == "torchrun" or not re.search(NOISE, process.text()), job.text()
        lines = re.findall(rf"^{job.package}: .*\b(?:lost|did not come) .*$", process.errors(), re.M)
        named = len(lines) == 1 or (job.way == "torchrun" and re.search(of_torchrun, process.errors()))
        named = named and all(re.search(expected, line) for line in lines)
        assert process.returncode == 1 and named, (process.returncode, name, job.text())


def lose_trainers(folder, mode, kills, flags=(), trainers=4):
    """Run a job of param_server whose ranks are killed: {rank: seconds after it began}. Return its summary.

    It lists the updates: every batch of every epoch must have been applied once.
    """
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
