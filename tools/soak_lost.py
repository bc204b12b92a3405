"""Run many jobs with --on_lost continue, in which random trainers or observers are lost, and check the other ranks.

    python tools/soak_lost.py param_server --cases 60
    python tools/soak_lost.py rl_rpc --cases 40 --seed 7

It prints a line for each case and a summary by kind of failure. The exit status is 1 if a check has failed. For both
packages it checks that the job's exit status is 0 and that `lost` in its summary is right. For rl_rpc it also checks
that all episodes were played, and for param_server (tests/harness/lost_trainers.py) that every image of every epoch was
applied exactly once and that rank 0's memory does not grow.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "harness"))

import lost_trainers
from faults import SIGNALS
from jobs import RunningJob

RL_MODES = ("step", "packed", "batched", "rollout", "async")
OBSERVERS, EPISODES = (1, 2, 3), {"rollout": 200, "async": 400}  # in the other modes 60


def draw_rl_case(number):
    """Return the case of this number: (mode, {observer's rank: (kind, seconds after the third episode)})."""
    draw = random.Random(number)
    victims = draw.sample(OBSERVERS, draw.randint(1, len(OBSERVERS) - 1))
    kinds = {victim: (draw.choice(list(SIGNALS)), round(draw.uniform(0.0, 1.0), 3)) for victim in victims}
    return RL_MODES[number % len(RL_MODES)], kinds


def run_rl_case(mode, faults):
    """Run a case and check the job; return its summary."""
    episodes = EPISODES.get(mode, 60)
    with tempfile.TemporaryDirectory() as folder:
        summary = os.path.join(folder, "summary.json")
        flags = ["--world_size", len(OBSERVERS) + 1, "--mode", mode, "--on_lost", "continue", "--transport", "uv"]
        flags += ["--max_episodes", episodes, "--reward_threshold", 1e9, "--log_interval", 1, "--eval_episodes", 1]
        flags += ["--summary_json", summary]
        with RunningJob("rl_rpc", "spawned", flags, fault=(0, "none", 0), cold=True) as job:
            assert job.wait_for_text("Episode 3", 90), job.text()
            pids, began = {victim: job.pid_of(victim) for victim in faults}, time.monotonic()
            for victim, (kind, at) in sorted(faults.items(), key=lambda fault: fault[1][1]):
                time.sleep(max(0.0, began + at - time.monotonic()))
                with contextlib.suppress(ProcessLookupError):  # the job has ended already
                    os.kill(pids[victim], SIGNALS[kind])
            assert job.wait(90) == [0], job.text()
            assert not job.survivors() and "Traceback" not in job.text(), job.text()
            with open(summary) as file:
                result = json.load(file)
            assert set(result["lost"]) <= set(faults) and result["episodes"] == episodes, (result, job.text())
            return result


PACKAGES = {"param_server": (lost_trainers.draw_case, lost_trainers.run_case), "rl_rpc": (draw_rl_case, run_rl_case)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1000, help="number of the first case")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    draw, run = PACKAGES[args.package]
    kinds, broken, lost = collections.Counter(), 0, 0
    for number in range(args.seed, args.seed + args.cases):
        mode, faults = draw(number)
        shown = " ".join(f"{victim}:{kind}:{at}" for victim, (kind, at) in sorted(faults.items()))
        started = time.monotonic()
        try:
            summary = run(mode, faults)
        except AssertionError as error:
            broken += 1
            print(f"{number} {mode}, {shown}: BROKEN {error}", flush=True)
            continue
        lost += len(summary["lost"])
        kinds.update(kind for kind, _ in faults.values())
        print(f"{number} {mode}, {shown}: lost {summary['lost']} ({time.monotonic() - started:.0f} s)", flush=True)
    print("Failures without harm:", ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items())))
    print(f"Lost ranks: {lost}")
    print(f"{broken} of {args.cases} cases failed a check")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
