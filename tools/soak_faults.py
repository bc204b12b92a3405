"""Kill and signal jobs at random moments, and check what DESIGN promises of their end: a name, a status, nothing left.

    python tools/soak_faults.py kills --cases 150     # kill -9, in each of the ways to start a job
    python tools/soak_faults.py signals --cases 60    # Ctrl-C, SIGTERM, SIGHUP
    python tools/soak_faults.py healthy --cases 500   # short jobs beside one busy process per core: all end with 0

A case is drawn from --seed and its number. `--only 17` runs case 17 alone. The last lines are a table of seconds.
"""

import argparse
import collections
import contextlib
import multiprocessing
import os
import pathlib
import random
import re
import signal
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "harness"))
os.environ.setdefault("COUNT_OF_STARTS", os.devnull)

from jobs import JOBS, RunningJob  # noqa: E402
from processes import environment_of, forks_of  # noqa: E402

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
LIMIT = 15  # seconds
# The kind of a case, and how many of 150 are of this kind.
KINDS = {"joining": 40, "last barrier": 25, "saving": 15, "starter": 20, "two": 10, "training": 40}
CHECK = "import sys, torch; torch.load(sys.argv[1], weights_only=True)"


def wait_until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def kill(*pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_case(number, draw):
    """Run one case; return (kind, seconds until the others had ended)."""
    kind = draw.choices([*KINDS], [*KINDS.values()])[0]
    package = draw.choice([*JOBS])
    way = "spawned" if kind == "starter" else draw.choice(("spawned", "terminals", "torchrun"))
    facts, size = JOBS[package], len(JOBS[package]["names"])
    victims = draw.sample(range(size), 2 if kind == "two" else 1)
    flags = [*facts["short" if kind == "last barrier" else "long"], "--join_timeout", 60]
    file = pathlib.Path(tempfile.mkdtemp(), "checkpoint")
    how = {}
    if kind == "saving":
        flags += ["--checkpoint", file]
        victims = [facts["names"].index(facts["writer"])]
    if kind == "starter" and draw.random() < 0.5:  # with SIGINT ignored, as after a shell's `&`
        how = {"by": ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable]}
    with RunningJob(package, way, flags, **how) as job:
        pids = wait_for_the_moment(job, kind, victims, file, draw)
        kill(pids[0])
        began = time.monotonic()
        if kind == "two":
            time.sleep(draw.uniform(0, 1))
            kill(pids[1])
        statuses = job.wait(LIMIT + 30 * (way == "torchrun"))
        seconds = time.monotonic() - began
        left = job.survivors(6)
        assert not left, (left, job.text())
        if kind == "starter":
            assert statuses == [-signal.SIGKILL], (statuses, job.text())
        else:
            check_consoles(job, kind, victims, statuses)
        if kind == "saving" and file.exists():
            assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", CHECK, str(file)) == 0, "a broken file"
    return kind, seconds


def wait_for_the_moment(job, kind, victims, file, draw):
    """Return the process ids of those that are to be killed, at the moment when the first one is."""
    starter, facts = job.processes[0].pid, JOBS[job.package]
    if kind == "joining" or (kind == "starter" and draw.random() < 0.25):
        if job.way == "terminals":  # the last rank is missing, so all wait for it, until a rank that has come is killed
            victims[0] = draw.randrange(len(job.names) - 1)
            last = len(job.names) - 1
            kill(job.processes[last].pid)
            assert job.wait_for_text(rf"waiting for .*rank {last} ", 90), job.text()
            return [job.processes[victims[0]].pid]
        pids = [pid_at_the_start(job, victim) for victim in victims]
        time.sleep(draw.uniform(0, 0.05 if kind == "starter" else 0.5))
        return [starter] if kind == "starter" else pids
    pids = [starter] if kind == "starter" else [job.pid_of(victim) for victim in victims]
    if kind == "saving":
        wait_until(lambda: os.path.exists(f"{file}.part"), 90)
    elif kind == "last barrier":
        assert job.wait_for_text(facts["done"], 90), job.text()
        time.sleep(draw.uniform(0, 0.1))
    else:
        assert job.wait_for_text(facts["training"], 90), job.text()
        time.sleep(draw.uniform(0, 2))
    return pids


def pid_at_the_start(job, rank):
    """Return the process id of a rank as soon as its process exists."""
    found = []

    def look():
        if job.way == "spawned":
            found[:] = forks_of(job.processes[0].pid)[rank : rank + 1]
        else:
            members = job.processes[0].members()
            found[:] = [pid for pid in members if f"RANK={rank}" in environment_of(pid)]
        return found

    wait_until(look)
    return found[0]


def check_consoles(job, kind, victims, statuses):
    """Check that each console has one line that names a victim; at the last barrier, all may have done their work."""
    named = "|".join(rf"rank {victim} \({job.names[victim]}\)" for victim in victims)
    by_torchrun = "|".join(rf"rank +: {victim} " for victim in victims)
    for process in job.processes:
        if process.returncode == -signal.SIGKILL:
            continue
        if process.returncode == 0:
            assert kind in ("last barrier", "saving"), (statuses, job.text())
            continue
        own = process.errors()
        lines = re.findall(rf"^{job.package}: .*lost .*$", own, re.M)
        assert process.returncode == 1, (statuses, job.text())
        assert job.way == "torchrun" or "Traceback" not in own, job.text()
        assert len(lines) == 1 or (job.way == "torchrun" and re.search(by_torchrun, own)), (statuses, job.text())
        assert not lines or re.search(f"lost ({named})", lines[0]), (named, statuses, job.text())


def signal_case(number, draw):
    """Send a signal to a job, at any moment from launch() to the end; return (way, seconds)."""
    package, way = draw.choice([*JOBS]), draw.choice(("spawned group", "spawned starter", "terminals"))
    facts, kind = JOBS[package], draw.choice([*STATUS])
    flags = facts[draw.choice(("long", "short"))]
    with RunningJob(package, way.split()[0], flags) as job:
        victim = draw.choice(job.processes)
        wait_until(lambda: handles_signals_by_default(victim.pid) or victim.poll() is not None)
        time.sleep(draw.uniform(0, 6))
        with contextlib.suppress(ProcessLookupError):
            (os.kill if way == "spawned starter" else os.killpg)(victim.pid, kind)
        began = time.monotonic()
        statuses = job.wait(6)
        seconds = time.monotonic() - began
        text = job.text()
        assert not job.survivors(1), text
        assert victim.returncode in (-kind, 0), (statuses, text)
        assert victim.errors() == "", text
        assert way == "terminals" or statuses[0] in (-kind, 0), (statuses, text)
    return way, seconds


def handles_signals_by_default(pid):
    """Return whether launch() has been called: before it, Python handles SIGINT."""
    try:
        caught = int(re.search(r"^SigCgt:\s+(\w+)", pathlib.Path(f"/proc/{pid}/status").read_text(), re.M)[1], 16)
    except (OSError, TypeError):
        return False
    loaded = b"libtorch" in pathlib.Path(f"/proc/{pid}/maps").read_bytes()
    return loaded and not caught >> (signal.SIGINT - 1) & 1


def healthy_case(number, draw):
    package = draw.choice([*JOBS])
    began = time.monotonic()
    with RunningJob(package, "spawned", JOBS[package]["shortest"]) as job:
        assert job.wait(120) == [0] and job.errors() == "", job.text()
    return package, time.monotonic() - began


def burn():
    while True:
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "signals", "healthy"])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    case = {"kills": kill_case, "signals": signal_case, "healthy": healthy_case}[args.what]
    if args.what == "healthy":
        for _ in range(os.cpu_count()):
            multiprocessing.Process(target=burn, daemon=True).start()
    seconds, failed = collections.defaultdict(list), []
    for number in range(args.cases) if args.only is None else [args.only]:
        try:
            kind, taken = case(number, random.Random(f"{args.seed} {number}"))
            seconds[kind].append(taken)
        except AssertionError as error:
            failed.append(number)
            print(f"case {number} failed: {error}", flush=True)
    for kind, values in sorted(seconds.items()):
        values.sort()
        print(f"{kind:<16} {len(values):>4} cases: median {statistics.median(values):.2f} s, most {values[-1]:.2f} s")
    print(f"{len(failed)} failed {failed or ''}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
