"""Kill and signal jobs at random moments, and check what docs/RUNNING.md promises: a name, a status, nothing left.

    python tools/soak_faults.py kills --cases 150      # kill -9, in each of the ways to start a job
    python tools/soak_faults.py forward --cases 30     # a server of ddp_rpc dies while it serves a forward pass
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

import psutil

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "harness"))

import lost_trainers  # noqa: E402
from faults import assert_named, changed_package  # noqa: E402
from jobs import JOBS, RunningJob  # noqa: E402
from processes import environment_of, forks_of  # noqa: E402
from programs import kill  # noqa: E402

WAYS = ("spawned", "terminals", "torchrun")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LIMIT = 15  # seconds
# The kind of a case, and how many of 150 are of this kind.
KINDS = {"joining": 40, "last barrier": 25, "saving": 15, "starter": 15, "starter, early": 5, "two": 10, "training": 40}
LOADS = "import sys, torch; torch.load(sys.argv[1], weights_only=True)"
# What a server does when a forward pass has called it for the Nth time: it dies.
LOOK_UP = "        with torch.set_grad_enabled(with_gradient):\n"
DIES = """        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == {}:
            __import__("os").kill(__import__("os").getpid(), 9)
"""
EPISODES = {"rollout": 200, "async": 400}
CONTINUING = [("param_server", mode) for mode in lost_trainers.MODES] + [("rl_rpc", mode) for mode in EPISODES]


def wait_until(true, seconds=60):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


# Each of the next functions draws a case. It returns what the case is, in words, and a function that runs it and
# returns after how many seconds the job had ended.


def draw_kill(number, draw, seed):
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    random.Random(seed).shuffle(kinds)
    number %= len(kinds)
    kind, nth = kinds[number], kinds[:number].count(kinds[number])
    package, rest = [*JOBS][nth % 4], nth // 4
    way = "spawned" if kind.startswith("starter") else WAYS[rest % 3]
    ignores = " &" * (kind.startswith("starter") and (nth + rest) % 2)  # with SIGINT ignored, as after a shell's `&`
    return (kind, package, way + ignores), functools.partial(run_kill, kind, package, way, ignores, draw)


def run_kill(kind, package, way, ignores, draw):
    facts, ranks = JOBS[package], range(len(JOBS[package]["names"]))
    victims = draw.sample(ranks, 2 if kind == "two" else 1)
    flags = [*facts["short" if kind == "last barrier" else "long"], "--join_timeout", 60]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "checkpoint")
        if kind == "saving":
            short_epochs = ["--max_batches", 5] if package == "param_server" else []
            flags += ["--checkpoint", file, *short_epochs]
            victims = [facts["names"].index(facts["writer"])]
        how = {"by": ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable]} if ignores else {}
        with RunningJob(package, way, flags, **how) as job:
            pids = wait_for_the_moment(job, kind, victims, file, draw)
            kill(pids[:1])
            began = time.monotonic()
            if kind == "two":
                time.sleep(draw.uniform(0, 1))
                kill(pids[1:])
            seconds = end_of(job, began, LIMIT + 30 * (way == "torchrun"))
            if kind.startswith("starter"):
                assert job.processes[0].returncode == -signal.SIGKILL, job.text()
            else:
                assert_named(job, victims, may_be_done=kind in ("last barrier", "saving"))
        if file.exists():
            assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", LOADS, file) == 0, "a broken file"
    return seconds


def wait_for_the_moment(job, kind, victims, file, draw):
    """Return the process ids of those that are to be killed, at the moment when the first one is."""
    facts, last = JOBS[job.package], len(job.names) - 1
    starter = [job.processes[0].pid] if kind.startswith("starter") else None
    if kind == "joining" and job.way == "terminals":
        # The last rank is missing, so all wait for it, until a rank that has come is killed.
        victims[0] = draw.randrange(last)
        kill([job.processes[last].pid])
        assert job.wait_for_text(rf"waiting for rank {last} ", 90), job.text()
        return [job.processes[victims[0]].pid]
    if kind in ("joining", "starter, early"):
        pid = pid_at_the_start(job, victims[0])
        time.sleep(draw.uniform(0, 0.05 if starter else 0.5))
        return starter or [pid]
    pids = starter or [job.pid_of(victim) for victim in victims]
    if kind == "saving":
        wait_until(lambda: os.path.exists(f"{file}.part"), 90)
    else:
        at_the_end = kind == "last barrier"
        assert job.wait_for_text(facts["done" if at_the_end else "training"], 90), job.text()
        time.sleep(draw.uniform(0, 0.1 if at_the_end else 2))
    return pids


def pid_at_the_start(job, rank):
    """Return the process id of a rank as soon as its process exists."""

    def found():
        if job.way == "spawned":
            return forks_of(job.processes[0].pid)[rank : rank + 1]
        return [pid for pid in job.processes[0].members() if f"RANK={rank}" in environment_of(pid)]

    while True:
        wait_until(found)
        pids = found()
        time.sleep(0.01)  # an import of torch starts ldconfig, and for a moment its process looks like a rank
        if pids and found() == pids:
            return pids[0]


def end_of(job, began, limit):
    """Wait until the job has ended, and nothing of it is left; return the seconds since `began`."""
    job.wait(limit)
    seconds = time.monotonic() - began
    left = job.survivors(6)
    assert not left, (left, job.text())
    return seconds


def draw_forward(number, draw, seed):
    mode, way, calls = ("hogwild", "sync")[number // 3 % 2], WAYS[number % 3], draw.randint(1, 500)
    return (way, mode, f"look-up {calls}"), functools.partial(run_forward, mode, way, calls)


def run_forward(mode, way, calls):
    server = JOBS["ddp_rpc"]["names"].index("server1")
    with tempfile.TemporaryDirectory() as folder:
        dies = DIES.format(calls) + LOOK_UP
        script = changed_package("ddp_rpc", pathlib.Path(folder), "hogwild.py", (LOOK_UP, dies))
        with RunningJob("ddp_rpc", way, [*JOBS["ddp_rpc"]["long"], "--mode", mode], script) as job:
            pid = job.pid_of(server)
            wait_until(lambda: has_ended(pid))
            seconds = end_of(job, time.monotonic(), LIMIT + 30 * (way == "torchrun"))
            assert_named(job, [server])
    return seconds


def has_ended(pid):
    """Return whether this process is a zombie or gone. (While it starts, it has no command line, either.)"""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def draw_signal(number, draw, seed):
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


def draw_continue(number, draw, seed):
    package, mode = CONTINUING[number % len(CONTINUING)]
    if package == "rl_rpc":
        run, kills = run_rl, {draw.randint(1, 2): round(draw.uniform(0.0, 1.0), 3)}
    else:
        victims = draw.sample(range(1, 5), draw.randint(1, 3))
        run, kills = lost_trainers.run_case, {victim: round(draw.uniform(0.0, 3.0), 3) for victim in victims}
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
            kill([pid])
        assert job.wait(90) == [0], job.text()
        assert not job.survivors() and "Traceback" not in job.text(), job.text()
    result = json.loads((folder / "summary.json").read_text())
    assert set(result["lost"]) <= set(kills) and result["episodes"] == EPISODES[mode], (result, job.text())


def draw_healthy(number, draw, seed):
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
    "forward": draw_forward,
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
        words, run = DRAW[args.what](number, random.Random(f"{args.seed} {number}"), args.seed)
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
