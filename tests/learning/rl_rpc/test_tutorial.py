"""rl_rpc/tutorial.py and single.py: their results are compared with a plain loop, and their commands are run."""

import re
import sys

import gymnasium as gym
import pytest
import torch

from helpers import ROOT, load_module, load_oracle
from programs import run_script
from tutorials import copied_alone, run_in_terminals, run_spawned

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


@pytest.mark.parametrize("episodes", [1, 10])
@pytest.mark.parametrize("observers", [1, 3])
def test_tutorial_is_the_plain_loop(observers, episodes):
    agent = oracle.tutorial_agent(PATH, observers + 1, 0.99, 1, handle=oracle.InTurn)
    single = load_module(ROOT / "rl_rpc/single.py")
    expected, parameters = reinforce(1, episodes, observers)
    for program in (agent, single.Agent(observers + 1, 0.99, 1)):
        torch.manual_seed(1)
        program.policy.__init__()  # again, so that both draw from the same beginning
        program.optimizer = torch.optim.Adam(program.policy.parameters(), lr=1e-2)
        lowest = []
        for _ in range(episodes):
            program.run_episode()
            lowest.append(program.finish_episode())
        assert lowest == expected
        assert oracle.distance(program, parameters) < 1e-5
    _, leaked = reinforce(1, 1, observers, leak=True)
    if episodes == 1 and observers == 3:  # as in the tutorial, with rewards of the next observer's episode
        assert oracle.distance(agent, leaked) > 1e-3


def test_tutorial_keeps_the_trajectories_of_observers_apart_that_play_at_once():
    agent = oracle.tutorial_agent(PATH, 5, 0.99, 1)
    lengths = {}
    for handle in agent.ob_rrefs:
        observer = handle.value
        steps = 2 + observer.id
        observer.env = gym.wrappers.TimeLimit(observer.env.unwrapped, max_episode_steps=steps)
        lengths[observer.id] = steps
    agent.run_episode()
    for ob_id, steps in lengths.items():
        assert len(agent.rewards[ob_id]) == len(agent.saved_log_probs[ob_id]) == steps
    assert agent.finish_episode() == 3


def test_tutorial_observers_see_different_starts():
    observers = [handle.value for handle in oracle.tutorial_agent(PATH, 3, 0.99, 1).ob_rrefs]
    first, second = (observer.env.reset()[0].tolist() for observer in observers)
    assert first != second


def test_tutorial_episode_ends_where_the_environment_only_truncates():
    agent = oracle.tutorial_agent(PATH, 2, 0.99, 1)
    handle = agent.ob_rrefs[0]
    handle.value.env = gym.wrappers.TimeLimit(handle.value.env.unwrapped, max_episode_steps=3)
    agent.run_episode()
    assert len(agent.rewards[1]) == 3


def test_tutorial_episode_of_one_step_leaves_the_policy_finite():
    agent = oracle.tutorial_agent(PATH, 2, 0.99, 1)
    agent.select_action(1, gym.make("CartPole-v1").reset(seed=1)[0])
    agent.report_reward(1, 1.0)
    assert agent.finish_episode() == 1.0
    assert all(parameter.isfinite().all() for parameter in agent.policy.parameters())


WRONG = ["--world_size 1", "--world_size 2 --rank 2", "--world_size 3 --rank -1"]


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


@pytest.mark.parametrize(
    ("path", "flags"),
    [
        *((PATH, flags) for flags in [*WRONG, "--max_episodes 0", "--log_interval 0"]),
        *(("rl_rpc/tutorial_batch.py", flags) for flags in [*WRONG, "--num_episode 0"]),
    ],
)
def test_tutorial_refuses_what_cannot_work(monkeypatch, capsys, path, flags):
    monkeypatch.setattr(sys, "argv", [path, *flags.split()])
    with pytest.raises(SystemExit) as refused:
        load_module(ROOT / path).parse_args()
    assert refused.value.code == 2 and "error: " in capsys.readouterr().err


def assert_plays(done, episodes):
    """Return the lowest reward of each episode that the program has printed."""
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "This will run until reward threshold of 475.0 is reached. Ctrl+C to exit."
    assert lines[-1] == f"Not solved after {episodes} episodes."
    rewards = [float(reward) for _, reward, _ in LINE.findall(done.stdout)]
    assert len(rewards) == episodes and min(rewards) > 0
    return rewards


FLAGS = ("--max_episodes", 5, "--log_interval", 1)


def test_tutorial_with_one_observer_prints_what_single_prints():
    done = run_spawned(PATH, *FLAGS)
    assert assert_plays(done, 5) == reinforce(1, 5, 1)[0]
    assert run_script("rl_rpc/single.py", *FLAGS).stdout == done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("observers", [1, 2, 4])
@pytest.mark.draw(4, "programs in one file")
def test_tutorial_in_terminals_and_spawned_alone_in_a_folder_with_a_space(tmp_path, observers):
    alone = copied_alone(PATH, tmp_path)
    agent, *others = run_in_terminals(alone, observers + 1, *FLAGS, cwd=tmp_path, cold=observers == 1)
    spawned = run_spawned(alone, "--world_size", observers + 1, *FLAGS, cwd=tmp_path, cold=observers == 1)
    played = [assert_plays(done, 5) for done in (agent, spawned)]
    if observers == 1:
        assert played == [reinforce(1, 5, 1)[0]] * 2
    for done in others:
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.draw(4, "programs in one file")
def test_tutorial_learns():
    """An untrained policy keeps the pole up for about 22 steps."""
    done = run_spawned(PATH, "--max_episodes", 60, "--log_interval", 60, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(LINE.findall(done.stdout)[-1][2]) > 40
