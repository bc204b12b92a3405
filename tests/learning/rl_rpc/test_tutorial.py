"""rl_rpc/tutorial.py and single.py: their results are compared with a plain loop, and their commands are run."""

import re
import sys

import gymnasium as gym
import pytest
import torch

from helpers import ROOT, load_module, load_oracle
from tutorials import FORKED, changed, copied_alone, run_in_terminals, run_spawned

oracle = load_oracle("rl_rpc")
PATH = "rl_rpc/tutorial.py"
LINE = re.compile(r"^Episode (\d+)\tLast reward: ([\d.]+)\tAverage reward: ([\d.]+)$", re.M)


def reinforce(seed, episodes, observers, leak=False, gamma=0.99):
    """Run REINFORCE in one process; return (lowest reward of each episode, parameters).

    With `leak`, returns are computed over the joined rewards of all observers, as in the published code and texts.
    """
    torch.manual_seed(seed)
    policy = torch.nn.Sequential(
        torch.nn.Linear(4, 128), torch.nn.Dropout(0.6), torch.nn.ReLU(), torch.nn.Linear(128, 2)
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    envs = [gym.make("CartPole-v1") for _ in range(observers)]
    for number, env in enumerate(envs):
        env.reset(seed=seed + number + 1)
    lowest = []
    for _ in range(episodes):
        log_probs, played = [], []
        for env in envs:
            state, _ = env.reset()
            rewards, ended = [], False
            while not ended:
                scores = policy(torch.from_numpy(state)[None])
                action = torch.multinomial(torch.softmax(scores, dim=1), 1, replacement=True).item()
                log_probs.append(torch.log_softmax(scores, dim=1)[0, action])
                state, reward, terminated, truncated, _ = env.step(action)
                rewards.append(reward)
                ended = terminated or truncated
            played.append(rewards)
        lowest.append(min(map(sum, played)))
        groups = [[reward for rewards in played for reward in rewards]] if leak else played
        returns = [sum(gamma**k * r for k, r in enumerate(one[t:])) for one in groups for t in range(len(one))]
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + torch.finfo(torch.float32).eps)
        optimizer.zero_grad()
        (-torch.stack(log_probs) * returns).sum().backward()
        optimizer.step()
    return lowest, list(policy.parameters())


def spawned_from_a_copy(tmp_path, *changes, observers, episodes):
    """Change a copy of the program, which is alone in a folder with a space in its name, and start all ranks of it."""
    program = changed(copied_alone(PATH, tmp_path), *changes)
    flags = ("--world_size", observers + 1, "--max_episodes", episodes, "--log_interval", 1)
    return run_spawned(program, *flags, cwd=tmp_path)


def test_tutorial_is_the_plain_loop(tmp_path):
    """The observers play in turn, because they share one generator: only then are the draws the same in every run."""
    call = "futs.append(ob_rref.rpc_async(timeout=0).run_episode(self.agent_rref))\n"
    last = '        print(f"Not solved after {args.max_episodes} episodes.")\n'
    in_turn = (call, call + " " * 12 + "futs[-1].wait()\n")
    save = (last, last + '    torch.save(list(agent.policy.parameters()), "end.pt")\n')
    done = spawned_from_a_copy(tmp_path, in_turn, save, observers=2, episodes=10)
    expected, parameters = reinforce(1, 10, 2)
    assert assert_plays(done, 10) == expected
    found = torch.load(tmp_path / "end.pt")
    assert difference(found, parameters) < 1e-5
    # With rewards of the next observer's episode, as in the tutorial, it would learn something else.
    assert difference(found, reinforce(1, 10, 2, leak=True)[1]) > 1e-3


def difference(ones, others):
    return max((one - other).abs().max().item() for one, other in zip(ones, others, strict=True))


@pytest.mark.quick
def test_the_same_without_rpc_is_the_plain_loop():
    agent = load_module(ROOT / "rl_rpc/single.py").Agent(4, 0.99, 1)
    lowest = []
    for _ in range(10):
        agent.run_episode()
        lowest.append(agent.finish_episode())
    expected, parameters = reinforce(1, 10, 3)
    assert lowest == expected and difference(agent.policy.parameters(), parameters) < 1e-5


def test_tutorial_keeps_the_trajectories_of_observers_apart_that_play_at_once(tmp_path):
    """Observer n plays n + 2 steps, after which its environment truncates the episode."""
    limit = ('self.env = gym.make("CartPole-v1")', 'self.env = gym.make("CartPole-v1", max_episode_steps=2 + self.id)')
    learns = "    def finish_episode(self):\n"
    lengths = "        print([[*map(len, kept.values())] for kept in (self.rewards, self.saved_log_probs)])\n"
    done = spawned_from_a_copy(tmp_path, limit, (learns, learns + lengths), FORKED, observers=2, episodes=6)
    assert assert_plays(done, 6) == [3.0] * 6
    assert done.stdout.count("[[3, 4], [3, 4]]\n") == 6


@pytest.mark.quick
def test_tutorial_episode_of_one_step_leaves_the_policy_finite(tmp_path):
    agent = oracle.tutorial_agent(PATH, tmp_path, 2, 0.99, 1)
    agent.select_action(1, gym.make("CartPole-v1").reset(seed=1)[0])
    agent.report_reward(1, 1.0)
    assert agent.finish_episode() == 1.0
    assert all(parameter.isfinite().all() for parameter in agent.policy.parameters())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("path", "flags"),
    [
        ("rl_rpc/tutorial.py", {"world-size": 3, "log-interval": 7}),
        ("rl_rpc/single.py", {"world-size": 3, "log-interval": 7}),
        ("rl_rpc/tutorial_batch.py", {"world-size": 3, "num-episode": 7}),
    ],
)
def test_flags_are_also_understood_as_the_published_programs_spell_them(monkeypatch, path, flags):
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", [path, *words])
    args = load_module(ROOT / path).parse_args()
    assert {name: vars(args)[name.replace("-", "_")] for name in flags} == flags


def assert_plays(done, episodes):
    """Return the lowest reward of each episode that the program has printed."""
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "This will run until reward threshold of 475.0 is reached. Ctrl+C to exit."
    assert lines[-1] == f"Not solved after {episodes} episodes."
    rewards = [float(reward) for _, reward, _ in LINE.findall(done.stdout)]
    assert len(rewards) == episodes and min(rewards) > 0
    return rewards


def test_tutorial_in_terminals_prints_what_single_prints_and_learns(tmp_path, run_here):
    """One observer. An untrained policy keeps the pole up for about 22 steps."""
    short, long = (("--max_episodes", episodes, "--log_interval", 1) for episodes in (5, 60))
    agent, observer = run_in_terminals(copied_alone(PATH, tmp_path), 2, *short)
    assert (observer.returncode, observer.stdout, observer.stderr) == (0, "", "")
    assert assert_plays(agent, 5) == reinforce(1, 5, 1)[0]
    single = run_here(ROOT / "rl_rpc/single.py", *long)
    assert LINE.findall(agent.stdout) == LINE.findall(single)[:5] and float(LINE.findall(single)[-1][2]) > 40
