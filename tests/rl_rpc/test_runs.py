"""rl_rpc as a user meets it: commands, what they print and write, and what they refuse."""

import json
import re
import statistics

import pytest
import torch

from helpers import assert_refused, run_main, run_script

MODES = ("step", "packed", "batched", "rollout")
SOLVED_LINE = re.compile(r"^Solved! Running reward is now ([\d.]+)!$", re.M)


def test_default_command_prints_what_the_tutorial_prints(tmp_path):
    """World size 2, mode step; and the run ends after --max_episodes (the tutorial's loop had no bound)."""
    summary_path, plot = tmp_path / "summary.json", tmp_path / "curve.png"
    done = run_main(
        "rl_rpc",
        "--max_episodes",
        12,
        "--eval_episodes",
        2,
        "--summary_json",
        summary_path,
        "--plot",
        plot,
        "--logdir",
        tmp_path / "logs",
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("This will run until reward threshold of 475.0 is reached")
    assert re.fullmatch(r"Episode 10\tLast reward: \d+\.00\tAverage reward: \d+\.\d\d", lines[1])
    assert re.fullmatch(r"Not solved: running reward is \d+\.\d\d after 12 episodes\.", lines[2])
    assert re.fullmatch(r"Greedy policy over 2 episodes: mean reward \d+\.\d\d, lowest \d+\.\d\d", lines[3])
    summary = json.loads(summary_path.read_text())
    assert summary["scenario"] == "rl_rpc" and summary["mode"] == "step" and summary["episodes"] == 12
    assert summary["solved"] is False and summary["eval_mean_reward"] > 0 and summary["env_steps_per_second"] > 0
    # Made: 1 observer and 12 episodes; served: 2 per step.
    assert summary["rpc_calls"] == 1 + 12 + 2 * summary["env_steps"]
    assert plot.read_bytes().startswith(b"\x89PNG") and any((tmp_path / "logs").iterdir())


@pytest.mark.slow
def test_rpc_calls_by_mode(tmp_path):
    calls, steps = {}, set()
    for mode in MODES:
        path = tmp_path / f"{mode}.json"
        done = run_main(
            "rl_rpc",
            "--mode",
            mode,
            "--world_size",
            3,
            "--max_episodes",
            5,
            "--eval_episodes",
            0,
            "--summary_json",
            path,
        )
        assert done.returncode == 0, done.stderr
        summary = json.loads(path.read_text())
        calls[mode] = summary["rpc_calls"]
        steps.add(summary["env_steps"])
    (steps,) = steps
    commands = 2 + 2 * 5  # two observers made, five episodes each
    assert calls == {
        "step": commands + 2 * steps,
        "packed": commands + steps,
        "batched": commands + steps + 2 * 5,
        "rollout": commands,
    }


def test_solves_cartpole_saves_and_plays(tmp_path):
    """Seed 3 is a quick one: about 50,000 steps."""
    summary_path, policy = tmp_path / "summary.json", tmp_path / "policy.pt"
    done = run_main("rl_rpc", "--mode", "rollout", "--seed", 3, "--save", policy, "--summary_json", summary_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(SOLVED_LINE.search(done.stdout)[1]) > 475
    summary = json.loads(summary_path.read_text())
    assert summary["solved"] is True and summary["eval_mean_reward"] >= 475
    played = run_script("rl_rpc/play.py", policy, "--episodes", 3)
    rewards = [float(r) for r in re.findall(r"^Episode \d\tReward: ([\d.]+)$", played.stdout, re.M)]
    assert (played.returncode, played.stderr) == (0, "")
    assert len(rewards) == 3 and statistics.mean(rewards) >= 475


def test_gif_or_one_line_that_says_what_is_missing(tmp_path):
    policy, gif = tmp_path / "policy.pt", tmp_path / "out.gif"
    flags = ("--mode", "rollout", "--max_episodes", 1, "--eval_episodes", 0)
    assert run_main("rl_rpc", *flags, "--save", policy).returncode == 0
    played = run_script("rl_rpc/play.py", policy, "--episodes", 1, "--gif", gif)
    try:
        import pygame  # noqa: F401  (gymnasium's renderer)
    except ImportError:
        assert played.returncode == 1 and not gif.exists()
        assert len(played.stderr.strip().splitlines()) == 1 and "gymnasium[classic-control]" in played.stderr
    else:
        assert played.returncode == 0 and gif.read_bytes().startswith(b"GIF8")


def test_play_refuses_what_is_not_a_policy(tmp_path):
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(b"not a policy")
    foreign = tmp_path / "foreign.pt"
    torch.save({"scenario": "rnn_rpc", "state": {}}, foreign)
    for path in (damaged, foreign, tmp_path / "missing.pt"):
        played = run_script("rl_rpc/play.py", path)
        assert played.returncode == 1 and len(played.stderr.strip().splitlines()) == 1, played.stderr
        assert path.name in played.stderr


def test_another_environment_end_to_end(tmp_path):
    """Rewards below zero and three actions; the running reward starts where the first episode is, not at 0."""
    done = run_main(
        "rl_rpc",
        "--mode",
        "rollout",
        "--env_id",
        "Acrobot-v1",
        "--max_episodes",
        2,
        "--log_interval",
        1,
        "--eval_episodes",
        0,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "threshold of -100.0" in done.stdout and "Solved" not in done.stdout
    assert re.search(r"^Episode 1\tLast reward: -\d+\.00\tAverage reward: -[1-5]\d\d\.\d\d$", done.stdout, re.M)


SLOW_ENVIRONMENT = """
import time
import gymnasium as gym
import numpy as np

class Slow(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (3,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(3, dtype=np.float32), {}

    def step(self, action):
        time.sleep(0.1)
        self.steps += 1
        return np.zeros(3, dtype=np.float32), 1.0, self.steps == 40, False, {}

gym.register("Slow-v0", Slow)
"""


def test_an_episode_may_take_longer_than_the_rpc_timeout(tmp_path):
    """Tutorial: run_episode is an RPC like any other, so an episode of more than 60 s is cut off. And an environment of
    one's own, named as module:ID, needs nothing but to be importable."""
    (tmp_path / "slow_environment.py").write_text(SLOW_ENVIRONMENT)
    done = run_main(
        "rl_rpc",
        "--env_id",
        "slow_environment:Slow-v0",
        "--rpc_timeout",
        3,
        "--max_episodes",
        1,
        "--log_interval",
        1,
        "--eval_episodes",
        0,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Episode 1\tLast reward: 40.00" in done.stdout


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--world_size", 1), "rank 0 is the agent, every other rank an observer"),
        (("--world_size", 2, "--rank", 2), "out of range"),
        (("--env_id", "NoSuchEnvironment-v0"), "NoSuchEnvironment"),
        (("--env_id", "Pendulum-v1"), "Discrete"),
        (("--env_id", "FrozenLake-v1"), "flat Box"),
        (("--master_port", 123456), "--master_port"),
        (("--gamma", 1.5), "--gamma"),
        (("--mode", "psychic"), "--mode"),
        (("--resume",), "--resume"),
    ],
)
def test_wrong_command_lines_are_refused_in_one_line(flags, word, capsys):
    assert_refused("rl_rpc", flags, capsys, word)


def test_checkpoints_that_are_not_one(tmp_path):
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(b"PK\x03\x04 half a file")
    done = run_main("rl_rpc", "--checkpoint", damaged, "--resume")
    assert_cause(done, "damaged.pt is not a readable checkpoint")
    other = tmp_path / "acrobot.pt"
    flags = ("--mode", "rollout", "--max_episodes", 1, "--eval_episodes", 0, "--checkpoint", other)
    assert run_main("rl_rpc", *flags, "--env_id", "Acrobot-v1").returncode == 0
    done = run_main("rl_rpc", *flags, "--resume")
    assert_cause(done, "--env_id Acrobot-v1")


def assert_cause(done, words):
    """The agent says why, once; the observers that it takes along say at most a line each. No traceback."""
    assert done.returncode == 1 and "Traceback" not in done.stderr
    cause, *others = done.stderr.strip().splitlines()
    assert "rank 0 (agent): ValueError: " in cause and words in cause
    assert all("lost rank 0 (agent)" in line for line in others)


@pytest.mark.slow
def test_bench_prints_a_table(tmp_path):
    out = tmp_path / "bench.json"
    done = run_script(
        "rl_rpc/bench.py", "--world_sizes", 2, "--repeats", 1, "--episodes", 5, "--step_episodes", 3, "--json", out
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(out.read_text())["2"]) == {*MODES, "single process"}
    for name in (*MODES, "single process"):
        assert re.search(rf"^{name}\s+[\d,]+ ", done.stdout, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_solves_cartpole_from_four_of_five_seeds(tmp_path, world_size):
    solved = 0
    for seed in range(1, 6):
        if solved == 4:
            break
        path = tmp_path / f"{seed}.json"
        done = run_main(
            "rl_rpc",
            "--mode",
            "rollout",
            "--world_size",
            world_size,
            "--seed",
            seed,
            "--summary_json",
            path,
            timeout=280,
        )
        assert (done.returncode, done.stderr) == (0, "")
        summary = json.loads(path.read_text())
        solved += summary["solved"] and summary["eval_mean_reward"] >= 475 and summary["episodes"] <= 2000
    assert solved >= 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("wire", ["direct", "cpu"])
def test_cuda_plays_the_same_episodes_as_the_cpu(tmp_path, wire):
    """Actions are equal (float64: rounding does not choose); weights to 1e-8 after 15 episodes."""
    states = {}
    for mode, device in [("rollout", "cpu")] + [(mode, "cuda") for mode in MODES]:
        path = tmp_path / f"{mode}_{device}.pt"
        done = run_main(
            "rl_rpc",
            "--mode",
            mode,
            "--world_size",
            3,
            "--device",
            device,
            "--wire",
            wire,
            "--max_episodes",
            15,
            "--eval_episodes",
            0,
            "--checkpoint",
            path,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        states[mode, device] = torch.load(path, weights_only=True, map_location="cpu")["state"]
    expected = states["rollout", "cpu"]
    for state in states.values():
        assert state["env_steps"] == expected["env_steps"]
        for name, weight in expected["policy"].items():
            torch.testing.assert_close(state["policy"][name], weight, rtol=0, atol=1e-8)
