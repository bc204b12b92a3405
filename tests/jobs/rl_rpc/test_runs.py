"""The commands of rl_rpc: what they print and write, and which command lines they refuse."""

import json
import re
import statistics
import sys

import pytest
import torch

from documented import assert_documented
from helpers import package_on_path
from patches import main_with
from programs import run_main, run_script

with package_on_path("rl_rpc"):
    import play as play_module


def test_solves_cartpole_saves_and_plays(tmp_path, capsys):
    """It takes some 70,000 environment steps. The number depends on the seed, and on the rounding of the CPU."""
    summary_path, policy = tmp_path / "summary.json", tmp_path / "policy.pt"
    done = run_main("rl_rpc", "--mode", "rollout", "--save", policy, "--summary_json", summary_path, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(re.search(r"^Solved! Running reward is now ([\d.]+)!$", done.stdout, re.M)[1]) > 475
    assert "Greedy policy over 100 episodes: " in done.stdout
    summary = json.loads(summary_path.read_text())
    assert summary["solved"] is True and summary["eval_mean_reward"] >= 475 and summary["env_steps_per_second"] > 0
    assert statistics.mean(rewards_of(capsys, policy, "--episodes", 3)) >= 475


def rewards_of(capsys, policy, *flags):
    """Return the rewards of the episodes that play.py prints."""
    play_module.main([str(word) for word in (policy, *flags)])
    lines = capsys.readouterr().out.splitlines()
    return [float(line.split()[3]) for line in lines if re.fullmatch(r"Episode \d\tReward: \d+\.00", line)]


@pytest.mark.quick
def test_training_that_diverges_ends_the_run_in_one_line(tmp_path):
    """In the tutorial, Categorical reports NaNs, in several lines and a traceback."""
    summary, saved = tmp_path / "summary.json", tmp_path / "saved.pt"
    flags = ("--mode", "rollout", "--lr", 1e300, "--max_episodes", 50, "--summary_json", summary)
    done = run_main("rl_rpc", *flags, "--checkpoint", saved, "--log_interval", 1)
    assert done.returncode == 1 and not summary.exists()
    cause, *others = done.stderr.strip().splitlines()
    pattern = r"rl_rpc: rank 0 \(agent\): step (\d+): the policy's loss is nan: training has diverged, try a lower --lr"
    step = int(re.fullmatch(pattern, cause)[1])
    assert all("lost rank 0 (agent)" in line for line in others), others
    # the last checkpoint is of the update before
    assert torch.load(saved, weights_only=True)["state"]["episodes"] + 1 == step


def save_policy(path):
    """Write a policy that has not learned; return the path."""
    with package_on_path("rl_rpc"):
        from glue import checkpoint

        from policy import Policy
    checkpoint.save(path, "rl_rpc", {"env_id": "CartPole-v1"}, {"policy": Policy(4, 2).state_dict()})
    return path


@pytest.mark.quick
def test_play_obeys_its_flags(tmp_path, capsys, monkeypatch):
    policy = save_policy(tmp_path / "policy.pt")
    two = rewards_of(capsys, policy, "--episodes", 2)
    assert len(two) == 2 and rewards_of(capsys, policy, "--episodes", 1) == two[:1]
    ten, again, others = (rewards_of(capsys, policy, "--episodes", 10, "--seed", seed) for seed in (2, 2, 3))
    assert ten == again != others and len({*ten}) > 1
    try:
        import pygame  # noqa: F401  (gymnasium's renderer)
    except ImportError:
        with pytest.raises(SystemExit, match=r"gymnasium\[classic-control\]"):
            play_module.main([str(policy), "--show"])
    else:
        monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # a window that nobody sees
        assert rewards_of(capsys, policy, "--episodes", 1, "--show") == two[:1]


@pytest.mark.quick
def test_play_refuses_what_is_not_a_policy(tmp_path):
    (tmp_path / "damaged\n \\xe4.pt").write_bytes(b"not a policy")
    settings = {
        "imports.pt": {"env_id": "this:CartPole-v1"},  # gymnasium would import the module `this`
        "nameless.pt": {},
        "unfit.pt": {"env_id": "CartPole-v1"},
    }
    for name, each in settings.items():
        torch.save({"scenario": "rl_rpc", "settings": each, "state": {"policy": {}}}, tmp_path / name)
    for path in (*tmp_path.iterdir(), tmp_path / "missing.pt"):
        with pytest.raises(SystemExit) as refused:
            play_module.main([str(path)])
        (line,) = refused.value.code.splitlines()  # sys.exit prints it, and exits with status 1
        assert path.name.replace("\n", "\\n") in line and "--resume" not in line
    assert "this" not in sys.modules


@pytest.mark.quick
def test_a_mistake_in_the_code_of_play_is_not_hidden(tmp_path, monkeypatch):
    """Only what the user must correct becomes one line. A mistake keeps its traceback."""
    monkeypatch.setattr(play_module.Actor, "act_greedily", lambda self, state: int("a mistake"))
    with pytest.raises(ValueError, match="a mistake"):
        play_module.main([str(save_policy(tmp_path / "policy.pt"))])


def the_policy_fails(program):
    program.Policy.forward = lambda self, states: self.layers(states)


def test_an_error_while_all_wait_for_the_agent_ends_the_job_at_once(tmp_path):
    """In mode batched, only the observer that has asked last gets the error. The other one gets no answer."""
    main = main_with("rl_rpc", tmp_path, the_policy_fails)
    done = run_script(main, "--mode", "batched", "--world_size", 3, "--rpc_timeout", 600, timeout=60)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert re.search(r'File ".*batched.py", line \d+, in answer_if_all_have_asked', done.stderr), done.stderr
    assert "rank 0 (agent): AttributeError: 'Policy' object has no attribute 'layers'" in done.stderr, done.stderr


ENVIRONMENTS = """
import time
import gymnasium as gym
import numpy as np
import torch.distributed.rpc as rpc

class Slow(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (3,)), gym.spaces.Discrete(2)
    episodes = 0

    def reset(self, *, seed=None, options=None):
        self.steps, self.episodes = 0, self.episodes + 1
        return np.zeros(3, dtype=np.float32), {}

    def step(self, action):
        if self.episodes == 2 and rpc.get_worker_info().id == 2:
            raise ValueError("this environment is broken")
        time.sleep(0.1)
        self.steps += 1
        over = self.episodes == 1 and self.steps == 40
        return np.zeros(3, dtype=np.float32), -1.0, over, False, {}

gym.register("Slow-v0", Slow, reward_threshold=-30)
"""


def test_an_episode_may_take_longer_than_the_rpc_timeout(tmp_path):
    """In the tutorial, run_episode has the default timeout, so an episode of more than 60 s fails.

    The environment is in a module of the user's, named as module:ID. In the second episode that of the second observer
    fails. This is reported although the first observer still plays.
    """
    (tmp_path / "own_environments.py").write_text(ENVIRONMENTS)
    flags = ("--env_id", "own_environments:Slow-v0", "--world_size", 3, "--rpc_timeout", 3, "--log_interval", 1)
    done = run_main("rl_rpc", *flags, "--max_episodes", 2, env={"PYTHONPATH": tmp_path}, timeout=60)
    assert "threshold of -30" in done.stdout and "Solved" not in done.stdout
    assert "Episode 1\tLast reward: -40.00\tAverage reward: -40.00" in done.stdout  # it does not start at 0
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert "rank 2 (observer2): ValueError: this environment is broken" in done.stderr, done.stderr
    assert_documented(done.stderr, "rank 2 (observer2): ValueError")
