"""The checks of exercises 1 and 2 of docs/exercises/rl_rpc.md. The page has the commands that run them.

Before these exercises are solved the checks fail, so pytest does not collect this file by itself.
"""

import json

import torch

from helpers import load_oracle
from patches import main_with
from programs import run_script

oracle = load_oracle("rl_rpc")
EPISODES, SEED = 10, 2


def test_last_reference():
    """A dismissed observer is deleted in its own process, and closes its environment. The agent goes on without it."""
    done = run_script("tests/learning/rl_rpc/dismiss_job.py", "--world_size", 3)
    assert (done.returncode, done.stderr) == (0, "")
    before, after, steps = done.stdout.splitlines()
    assert json.loads(before) == [[1, 0], [1, 0]]
    assert json.loads(after) == [[0, 1], [1, 0]], "is there another reference?"
    played, learned_from = map(int, steps.split())
    assert played == learned_from, "the agent has learned again from the old episode of the dismissed observer"


def refuses_reports(threading, step):
    report = step.Agent.report_reward

    def report_reward(self, ob_id, reward):
        assert threading.current_thread() is threading.main_thread(), "an observer has reported a reward"
        report(self, ob_id, reward)

    step.Agent.report_reward = report_reward


def test_late_rewards(tmp_path):
    """Mode `late` plays and learns as one process does, and no observer reports a reward during an episode."""
    file = tmp_path / "end.pt"
    flags = ("--max_episodes", EPISODES, "--seed", SEED, "--eval_episodes", 0, "--log_interval", 1)
    main = main_with("rl_rpc", tmp_path, refuses_reports)
    done = run_script(main, "--mode", "late", "--world_size", 3, *flags, "--checkpoint", file)
    assert (done.returncode, done.stderr) == (0, "")
    lines, state = oracle.EPISODE_LINE.findall(done.stdout), torch.load(file, weights_only=True)["state"]
    oracle.assert_is_the_single_process_loop(lines, state, oracle.single_process_reinforce(SEED, EPISODES, observers=2))
