"""rl_rpc/tutorial.py computes what single.py does, and their commands are run."""

import sys

import gymnasium as gym
import pytest

from helpers import ROOT, largest_difference, load_module, load_oracle
from patches import patched
from tutorials import copied_alone, run_in_terminals, run_spawned

oracle = load_oracle("rl_rpc")
PATH = "rl_rpc/tutorial.py"


def rewards_of(agent):
    """Return the lowest reward of each of ten episodes."""
    rewards = []
    for _ in range(10):
        agent.run_episode()
        rewards.append(agent.finish_episode())
    return rewards


@pytest.mark.quick
def test_tutorial_is_the_plain_loop():
    """The observers are in this process, and play in turn, because they share one generator."""
    agent = oracle.tutorial_agent(PATH, 3, 0.99, 1, in_turn=True)
    found = rewards_of(agent)
    expected = load_module(ROOT / "rl_rpc/single.py").Agent(3, 0.99, 1)
    assert found == rewards_of(expected)
    assert largest_difference(agent.policy.parameters(), expected.policy.parameters()) < 1e-5


def plays_short_episodes(program):
    make, finish_episode = program.Observer.__init__, program.Agent.finish_episode

    def make_with_a_limit(self, seed):
        make(self, seed)
        self.env = program.gym.make("CartPole-v1", max_episode_steps=2 + self.id)

    def print_lengths_and_finish(self):
        print([[*map(len, kept.values())] for kept in (self.rewards, self.saved_log_probs)])
        return finish_episode(self)

    program.Observer.__init__, program.Agent.finish_episode = make_with_a_limit, print_lengths_and_finish


def test_tutorial_keeps_the_trajectories_of_observers_apart_that_play_at_once(tmp_path):
    """Observer n plays n + 2 steps, after which its environment truncates the episode.

    The program is alone in a folder with a space in its name.
    """
    program = patched(copied_alone(PATH, tmp_path), plays_short_episodes)
    done = run_spawned(program, "--world_size", 3, "--max_episodes", 6, "--log_interval", 1, cwd=tmp_path)
    assert assert_plays(done, 6) == [3.0] * 6
    assert done.stdout.count("[[3, 4], [3, 4]]\n") == 6


def assert_plays(done, episodes):
    """Return the lowest reward of each episode that the program has printed."""
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "This will run until reward threshold of 475.0 is reached. Ctrl+C to exit."
    assert lines[-1] == f"Not solved after {episodes} episodes."
    rewards = [float(reward) for _, reward, _ in oracle.EPISODE_LINE.findall(done.stdout)]
    assert len(rewards) == episodes and min(rewards) > 0
    return rewards


def test_tutorial_in_terminals_prints_what_single_prints_and_learns(tmp_path, run_here):
    """One observer. An untrained policy keeps the pole up for about 22 steps."""
    short, long = (("--max_episodes", episodes, "--log_interval", 1) for episodes in (5, 60))
    agent, observer = run_in_terminals(copied_alone(PATH, tmp_path), 2, *short)
    assert (observer.returncode, observer.stdout, observer.stderr) == (0, "", "")
    assert_plays(agent, 5)
    single = oracle.EPISODE_LINE.findall(run_here(ROOT / "rl_rpc/single.py", *long))
    assert oracle.EPISODE_LINE.findall(agent.stdout) == single[:5] and float(single[-1][2]) > 40


@pytest.mark.quick
def test_tutorial_episode_of_one_step_leaves_the_policy_finite():
    agent = oracle.tutorial_agent(PATH, 2, 0.99, 1)
    agent.select_action(1, gym.make("CartPole-v1").reset(seed=1)[0])
    agent.report_reward(1, 1.0)
    assert agent.finish_episode() == 1.0
    assert all(parameter.isfinite().all() for parameter in agent.policy.parameters())


@pytest.mark.quick
@pytest.mark.parametrize("program, flag", [("tutorial", "log-interval"), ("tutorial_batch", "num-episode")])
def test_flags_are_also_understood_as_the_published_programs_spell_them(monkeypatch, program, flag):
    monkeypatch.setattr(sys, "argv", [program, "--world-size", "3", f"--{flag}", "7"])
    args = load_module(ROOT / f"rl_rpc/{program}.py").parse_args()
    assert (args.world_size, vars(args)[flag.replace("-", "_")]) == (3, 7)
