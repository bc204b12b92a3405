"""Run many jobs with --on_lost continue, in which random trainers or observers are lost, and check the other ranks.

    python tools/soak_lost.py param_server --cases 60
    python tools/soak_lost.py rl_rpc --cases 40 --seed 7

It prints a line for each case. The exit status is 1 if a check has failed. For both packages it checks that the job's
exit status is 0 and that `lost` in its summary is right. For rl_rpc it also checks that all episodes were played, and
for param_server (tests/harness/lost_trainers.py) that every image of every epoch was applied exactly once.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "harness"))

import lost_trainers
from jobs import RunningJob

EPISODES = {"rollout": 200, "async": 400}
OBSERVERS = 2


def draw_rl_case(number):
    """Return the case of this number: (mode, {observer's rank: seconds after the third episode, when it is killed})."""
    draw = random.Random(number)
    return list(EPISODES)[number % 2], {draw.randint(1, OBSERVERS): round(draw.uniform(0.0, 1.0), 3)}


def run_rl_case(folder, mode, kills):
    """Run a case and check the job; return its summary."""
    flags = ["--mode", mode, "--on_lost", "continue", "--max_episodes", EPISODES[mode], "--reward_threshold", 1e9]
    flags += ["--log_interval", 1, "--eval_episodes", 1, "--summary_json", folder / "summary.json"]
    with RunningJob("rl_rpc", "spawned", flags) as job:
        assert job.wait_for_text("Episode 3", 90), job.text()
        pids, began = {victim: job.pid_of(victim) for victim in kills}, time.monotonic()
        for victim, at in kills.items():
            time.sleep(max(0.0, began + at - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # the job has ended already
                os.kill(pids[victim], signal.SIGKILL)
        assert job.wait(90) == [0], job.text()
        assert not job.survivors() and "Traceback" not in job.text(), job.text()
    result = json.loads((folder / "summary.json").read_text())
    assert set(result["lost"]) <= set(kills) and result["episodes"] == EPISODES[mode], (result, job.text())
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
    broken = lost = 0
    for number in range(args.seed, args.seed + args.cases):
        mode, kills = draw(number)
        shown = " ".join(f"{victim}:{at}" for victim, at in sorted(kills.items()))
        started = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                summary = run(pathlib.Path(folder), mode, kills)
        except AssertionError as error:
            broken += 1
            print(f"{number} {mode}, {shown}: BROKEN {error}", flush=True)
            continue
        lost += len(summary["lost"])
        print(f"{number} {mode}, {shown}: lost {summary['lost']} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"Lost ranks: {lost}")
    print(f"{broken} of {args.cases} cases failed a check")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
