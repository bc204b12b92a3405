"""Kill and signal jobs at random moments, and check what docs/RUNNING.md promises: a name, a status, nothing left.

    python tools/soak_faults.py kills --cases 150      # kill -9, in each of the ways to start a job
    python tools/soak_faults.py signals --cases 60     # Ctrl-C, SIGTERM, SIGHUP
    python tools/soak_faults.py continue --cases 60    # kill -9 with --on_lost continue: the others do all the work
    python tools/soak_faults.py healthy --cases 500    # short jobs beside one busy process per core: all end with 0

It prints a line for each case, and then a table of the seconds between a fault and the end of the job. The exit status
is 1 if a case has failed. A case depends on --seed and its number only: `--only 17` runs case 17 alone.
"""

import argparse
import collections
import contextlib
import functools
import json
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

from faults import lose_trainers, run_case  # noqa: E402
from jobs import JOBS, RunningJob  # noqa: E402

WAYS = ("spawned", "terminals", "torchrun")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EPISODES = {"rollout": 200, "async": 400}
CONTINUING = [("param_server", mode) for mode in ("replica", "bounded", "sync", "overlap")]
CONTINUING += [("rl_rpc", mode) for mode in EPISODES]


def wait_until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


# Each of the next functions draws a case. It returns what the case is, in words, and a function that runs it and
# returns after how many seconds the job had ended.


def draw_kill(number, draw):
    """At any moment from the start of the ranks to the end of the work."""
    package, way = [*JOBS][number % 4], WAYS[number // 4 % 3]
    rank, moment = draw.randrange(len(JOBS[package]["names"])), draw.choice(("start", "training", "end"))
    case = package, way, rank, moment, round(draw.uniform(0, 3), 3)
    return (f"{way}, {moment}", "-".join(map(str, case))), functools.partial(run_case, *case)


def end_of(job, began, limit):
    """Wait until the job has ended, and nothing of it is left; return the seconds since `began`."""
    job.wait(limit)
    seconds = time.monotonic() - began
    left = job.left_over(6)
    assert not left, (left, job.text())
    return seconds


def draw_signal(number, draw):
    """At any moment from launch() to the end. In terminals, each of them gets the signal."""
    sent_to = ("spawned group", "spawned starter", "terminals")[number % 3]
    package, kind = draw.choice([*JOBS]), draw.choice(SIGNALS)
    run = functools.partial(run_signal, package, sent_to, kind, draw.choice(("long", "short")), draw)
    return (sent_to, package, kind.name), run


def run_signal(package, sent_to, kind, size, draw):
    with RunningJob(package, sent_to.split()[0], JOBS[package][size]) as job:
        for process in job.processes:
            wait_until(lambda it=process: handles_signals_by_default(it.pid) or it.poll() is not None)
        time.sleep(draw.uniform(0, 6))
        for process in job.processes:
            with contextlib.suppress(ProcessLookupError):
                (os.kill if sent_to == "spawned starter" else os.killpg)(process.pid, kind)
        seconds = end_of(job, time.monotonic(), 6)
        statuses = {process.returncode for process in job.processes}
        assert statuses <= {-kind, 0} and job.errors() == "", (statuses, job.text())
    return seconds


def handles_signals_by_default(pid):
    """Return whether launch() has been called: before it, Python handles SIGINT."""
    try:
        caught = int(re.search(r"^SigCgt:\s+(\w+)", pathlib.Path(f"/proc/{pid}/status").read_text(), re.M)[1], 16)
        handles_sigint = caught >> (signal.SIGINT - 1) & 1
        return not handles_sigint and b"libtorch" in pathlib.Path(f"/proc/{pid}/maps").read_bytes()
    except (OSError, TypeError):
        return False


def draw_continue(number, draw):
    package, mode = CONTINUING[number % len(CONTINUING)]
    if package == "rl_rpc":
        run, kills = run_rl, {draw.randint(1, 2): round(draw.uniform(0.0, 1.0), 3)}
    else:
        victims = draw.sample(range(1, 5), draw.randint(1, 3))
        run, kills = lose_trainers, {victim: round(draw.uniform(0.0, 3.0), 3) for victim in victims}
    shown = " ".join(f"{victim}:{at}" for victim, at in sorted(kills.items()))
    return (f"{package} {mode}", shown), functools.partial(run_continue, run, mode, kills)


def run_continue(run, mode, kills):
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run(pathlib.Path(folder), mode, kills)
    return time.monotonic() - began


def run_rl(folder, mode, kills):
    """Run a job of rl_rpc, and check that all episodes were played. `kills`: {rank: seconds after episode 3}."""
    flags = ["--mode", mode, "--on_lost", "continue", "--max_episodes", EPISODES[mode], "--reward_threshold", 1e9]
    flags += ["--log_interval", 1, "--eval_episodes", 1, "--summary_json", folder / "summary.json"]
    with RunningJob("rl_rpc", "spawned", flags) as job:
        assert job.wait_for_text("Episode 3", 90), job.text()
        for victim, after in kills.items():
            pid = job.pid_of(victim)
            time.sleep(after)
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(pid, signal.SIGKILL)
        assert job.wait(90) == [0], job.text()
        assert not job.left_over() and "Traceback" not in job.text(), job.text()
    result = json.loads((folder / "summary.json").read_text())
    assert set(result["lost"]) <= set(kills) and result["episodes"] == EPISODES[mode], (result, job.text())


def draw_healthy(number, draw):
    package = [*JOBS][number % 4]
    return (package,), functools.partial(run_healthy, package)


def run_healthy(package):
    began = time.monotonic()
    with RunningJob(package, "spawned", JOBS[package]["shortest"]) as job:
        assert job.wait(120) == [0] and job.errors() == "", job.text()
    return time.monotonic() - began


def burn():
    while True:
        pass


DRAW = {
    "kills": draw_kill,
    "signals": draw_signal,
    "continue": draw_continue,
    "healthy": draw_healthy,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=DRAW)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="CASE")
    args = parser.parse_args()
    for number in SIGNALS:  # nohup and a shell's `&` let some of them be ignored, and jobs would inherit this
        signal.signal(number, signal.SIG_DFL)
    if args.what == "healthy":
        for _ in range(os.cpu_count()):
            multiprocessing.Process(target=burn, daemon=True).start()
    seconds, failed = collections.defaultdict(list), []
    for number in range(args.cases) if args.only is None else [args.only]:
        words, run = DRAW[args.what](number, random.Random(f"{args.seed} {number}"))
        try:
            taken = run()
            seconds[words[0]].append(taken)
            outcome = f"{taken:.2f} s"
        except AssertionError as error:
            failed.append(number)
            outcome = f"FAILED: {error}"
        print(f"case {number}: {', '.join(words)}: {outcome}", flush=True)
    for kind, values in sorted(seconds.items()):
        print(f"{kind:<22} {len(values):>4} cases: median {statistics.median(values):.2f} s, most {max(values):.2f} s")
    print(f"{len(failed)} failed {failed or ''}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
