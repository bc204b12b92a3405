"""The commands of rl_rpc: what they print and write, and which command lines they refuse."""

import json
import re
import statistics
import sys

import pytest
import torch

from helpers import assert_one_line_error, assert_refused, load_oracle, package_on_path
from programs import run_main, run_script

oracle = load_oracle("rl_rpc")
MODES = oracle.MODES
SOLVED_LINE = re.compile(r"^Solved! Running reward is now ([\d.]+)!$", re.M)

with package_on_path("rl_rpc"):
    import play as play_module


def test_default_command_prints_what_the_tutorial_prints(tmp_path):
    """World size 2, mode step. The run ends after --max_episodes; the tutorial's loop has no such limit."""
    summary_path, plot, saved = tmp_path / "summary.json", tmp_path / "curve.png", tmp_path / "saved.pt"
    flags = ("--max_episodes", 12, "--eval_episodes", 2, "--checkpoint", saved)
    outputs = ("--summary_json", summary_path, "--plot", plot)
    done = run_main("rl_rpc", *flags, *outputs)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("This will run until reward threshold of 475.0 is reached")
    assert re.fullmatch(r"Episode 10\tLast reward: \d+\.00\tAverage reward: \d+\.\d\d", lines[1])
    assert re.fullmatch(r"Not solved: running reward is \d+\.\d\d after 12 episodes\.", lines[2])
    assert re.fullmatch(r"Greedy policy over 2 episodes: mean reward \d+\.\d\d, lowest \d+\.\d\d", lines[3])
    summary = json.loads(summary_path.read_text())
    assert summary["scenario"] == "rl_rpc" and summary["mode"] == "step" and summary["episodes"] == 12
    assert summary["solved"] is False and summary["eval_mean_reward"] > 0 and summary["env_steps_per_second"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    # The run equals the single-process loop with one observer.
    rewards, parameters = oracle.single_process_reinforce(seed=1, episodes=12)
    assert f"Last reward: {rewards[9]:.2f}\t" in lines[1]
    state = torch.load(saved, weights_only=True)["state"]
    for name, expected in parameters.items():
        torch.testing.assert_close(state["policy"][name], expected, rtol=0, atol=1e-5)


def test_a_checkpoint_of_another_network_is_refused_in_one_line(tmp_path):
    settings = {"seed": 1, "env_id": "CartPole-v1"}
    torch.save({"scenario": "rl_rpc", "settings": settings, "state": {"policy": {}}}, tmp_path / "c.pt")
    done = run_main("rl_rpc", "--max_episodes", 2, "--checkpoint", tmp_path / "c.pt", "--resume")
    assert_one_line_error(done, 1, "rank 0 (agent): cannot go on from", "c.pt", "Missing key")


@pytest.mark.slow
@pytest.mark.draw(2, "learns")
def test_solves_cartpole_saves_and_plays(tmp_path, capsys):
    """It takes some 70,000 environment steps. The number depends on the seed, and on the rounding of the CPU."""
    summary_path, policy = tmp_path / "summary.json", tmp_path / "policy.pt"
    done = run_main("rl_rpc", "--mode", "rollout", "--save", policy, "--summary_json", summary_path, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(SOLVED_LINE.search(done.stdout)[1]) > 475
    summary = json.loads(summary_path.read_text())
    assert summary["solved"] is True and summary["eval_mean_reward"] >= 475
    play_module.main([str(policy), "--episodes", "3"])
    rewards = [float(r) for r in re.findall(r"^Episode \d\tReward: ([\d.]+)$", capsys.readouterr().out, re.M)]
    assert len(rewards) == 3 and statistics.mean(rewards) >= 475


def test_training_that_diverges_ends_the_run_in_one_line(tmp_path):
    """In the tutorial, Categorical reports NaNs, in several lines and a traceback. No restart would help."""
    summary, saved = tmp_path / "summary.json", tmp_path / "saved.pt"
    flags = ("--mode", "rollout", "--lr", 1e300, "--max_episodes", 50, "--summary_json", summary, "--max_restarts", 1)
    done = run_main("rl_rpc", *flags, "--checkpoint", saved, "--log_interval", 1)
    assert_cause(done, r"step \d+: the policy's loss is nan: training has diverged, try a lower --lr")
    assert not summary.exists()
    # the last checkpoint is of the update before
    assert f"step {torch.load(saved, weights_only=True)['state']['episodes'] + 1}:" in done.stderr


@pytest.mark.slow
def test_gif_or_one_line_that_says_what_is_missing(tmp_path):
    """It is cold, because gymnasium sets an environment variable when it is imported, without which pygame greets."""
    policy, gif = tmp_path / "policy.pt", tmp_path / "out.gif"
    with package_on_path("rl_rpc"):
        from glue import checkpoint
        from policy import Policy
    checkpoint.save(policy, "rl_rpc", {"env_id": "CartPole-v1"}, {"policy": Policy(4, 2).state_dict()})
    screen = {"XDG_RUNTIME_DIR": "", "DISPLAY": "", "WAYLAND_DISPLAY": ""}  # no screen
    played = run_script("rl_rpc/play.py", policy, "--episodes", 1, "--gif", gif, env=screen, cold=True)
    try:
        import pygame  # noqa: F401  (gymnasium's renderer)
    except ImportError:
        assert played.returncode == 1 and not gif.exists()
        assert len(played.stderr.strip().splitlines()) == 1 and "gymnasium[classic-control]" in played.stderr
    else:
        assert (played.returncode, played.stderr) == (0, "") and gif.read_bytes().startswith(b"GIF8")
        assert re.fullmatch(r"Episode 1\tReward: \d+\.00\n\d+ frames written to .*\n", played.stdout)


def test_play_refuses_what_is_not_a_policy(tmp_path):
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(b"not a policy")
    foreign = tmp_path / "foreign.pt"
    torch.save({"scenario": "rnn_rpc", "state": {}}, foreign)
    imports = tmp_path / "imports.pt"  # gymnasium would import the module `this`
    nameless = tmp_path / "nameless.pt"
    unfit = tmp_path / "unfit.pt"
    for path, names in (
        (imports, {"env_id": "this:CartPole-v1"}),
        (nameless, {}),
        (unfit, {"env_id": "CartPole-v1"}),
    ):
        torch.save({"scenario": "rl_rpc", "settings": names, "state": {"policy": {}}}, path)
    for path in (damaged, foreign, tmp_path / "missing.pt", imports, nameless, unfit):
        with pytest.raises(SystemExit) as refused:
            play_module.main([str(path)])
        (line,) = refused.value.code.splitlines()  # sys.exit prints it, and exits with status 1
        assert path.name in line and "--resume" not in line
    assert "this" not in sys.modules


ENVIRONMENTS = """
import time
import gymnasium as gym
import numpy as np
import torch.distributed.rpc as rpc

class Slow(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (3,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(3, dtype=np.float32), {}

    def step(self, action):
        time.sleep(0.1)
        self.steps += 1
        return np.zeros(3, dtype=np.float32), -1.0, self.steps == 40, False, {}

class BreaksForTheSecond(Slow):
    def step(self, action):
        if rpc.get_worker_info().id == 2:
            raise ValueError("this environment is broken")
        return np.zeros(3, dtype=np.float32), 1.0, False, False, {}

gym.register("Slow-v0", Slow, reward_threshold=-30)
gym.register("Breaks-v0", BreaksForTheSecond)
"""


@pytest.fixture
def run_in(tmp_path):
    """Return a function that runs main.py with an environment of a user's module, named as module:ID."""
    (tmp_path / "own_environments.py").write_text(ENVIRONMENTS)

    def run(env_id, *flags):
        flags += ("--log_interval", 1, "--eval_episodes", 0)
        return run_main("rl_rpc", "--env_id", f"own_environments:{env_id}", *flags, env={"PYTHONPATH": tmp_path})

    return run


@pytest.mark.slow
def test_an_episode_may_take_longer_than_the_rpc_timeout(run_in):
    """In the tutorial, run_episode has the default timeout, so an episode of more than 60 s fails."""
    done = run_in("Slow-v0", "--rpc_timeout", 3, "--max_episodes", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert "threshold of -30" in done.stdout and "Solved" not in done.stdout
    assert "Episode 1\tLast reward: -40.00\tAverage reward: -40.00" in done.stdout  # it does not start at 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["step", "batched"])
@pytest.mark.draw(1)
def test_an_error_of_the_second_observer_is_reported_while_the_first_still_plays(run_in, mode):
    """The first observer's episode has 10,000 steps. In `batched` it waits for the second, which has failed."""
    done = run_in("Breaks-v0", "--world_size", 3, "--mode", mode)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert "rl_rpc: rank 2 (observer2): ValueError: this environment is broken" in done.stderr, done.stderr


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
        (("--lr", 0), "--lr"),
        (("--mode", "psychic"), "--mode"),
        (("--save", "no/such/folder/policy.pt"), "folder does not exist"),
        (("--resume",), "--resume"),
    ],
)
def test_wrong_command_lines_are_refused_in_one_line(flags, word, capsys):
    assert_refused("rl_rpc", flags, capsys, word)


def assert_cause(done, pattern):
    """Check that the agent prints the cause in one line, and each observer at most one line, without a traceback."""
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    cause, *others = done.stderr.strip().splitlines()
    assert cause.startswith("rl_rpc: rank 0 (agent): ") and re.search(pattern, cause), cause
    assert all("lost rank 0 (agent)" in line for line in others)


@pytest.mark.slow
@pytest.mark.draw(1, "benches")
def test_bench_prints_a_table(tmp_path):
    out = tmp_path / "bench.json"
    done = run_script(
        "bench/rl_rpc.py", "--world_sizes", 2, "--repeats", 1, "--episodes", 5, "--step_episodes", 3, "--json", out
    )
    assert done.returncode == 0, done.stderr
    names = (*MODES, "async", "single process", "bare environment")
    assert set(json.loads(out.read_text())["2"]) == set(names)
    for name in names:
        assert re.search(rf"^{name}\s+[\d,]+ ", done.stdout, re.M)
