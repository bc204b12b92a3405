"""rl_rpc/tutorial.py and single.py: their results are compared with a plain loop, and their commands are run."""

import re
import sys
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch

from helpers import ROOT, load_module, run_script
from tutorials import copied_alone, run_in_terminals, run_spawned

test_agent = load_module(ROOT / "tests" / "rl_rpc" / "test_agent.py")
PATH = "rl_rpc/tutorial.py"
LINE = re.compile(r"^Episode (\d+)\tLast reward: ([\d.]+)\tAverage reward: ([\d.]+)$", re.M)


def make_agent(path, world_size, *settings, handle=test_agent.Handle):
    """Return the Agent of a program, without RPC: each observer is an object of this process, in a Handle."""
    module = load_module(ROOT / path)

    def remote(name, cls, args):
        module.rpc.get_worker_info = lambda: SimpleNamespace(id=int(re.search(r"\d+", name)[0]))
        return handle(cls(*args))

    module.rpc = SimpleNamespace(remote=remote, RRef=handle)
    return module.Agent(world_size, *settings)


def reinforce(seed, episodes, observers, leak=False, gamma=0.99):
    """Run REINFORCE in one process; return (lowest reward of each episode, parameters).

    With `leak`, returns are computed over the joined rewards of all observers, as in the published code and texts.
    """
    torch.manual_seed(1000 * seed)
    first, last = torch.nn.Linear(4, 128), torch.nn.Linear(128, 2)
    parameters = [*first.parameters(), *last.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    envs = [gym.make("CartPole-v1") for _ in range(observers)]
    draws = [torch.Generator().manual_seed(1000 * seed + number + 1) for number in range(observers)]
    for number, env in enumerate(envs):
        env.reset(seed=1000 * seed + number + 1)
    lowest = []
    for _ in range(episodes):
        log_probs, played = [], []
        for env, generator in zip(envs, draws, strict=True):
            state, _ = env.reset()
            rewards, ended = [], False
            while not ended:
                mask = (torch.rand((1, 128), generator=generator) >= 0.6) / 0.4
                h = (torch.from_numpy(state)[None] @ first.weight.T + first.bias) * mask
                scores = torch.relu(h) @ last.weight.T + last.bias
                action = torch.multinomial(torch.softmax(scores, dim=1), 1, generator=generator).item()
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
    return lowest, parameters


def distance(agent, parameters):
    pairs = zip(agent.policy.parameters(), parameters, strict=True)
    return max((mine - other).abs().max().item() for mine, other in pairs)


@pytest.mark.parametrize("episodes", [1, 10])
@pytest.mark.parametrize("observers", [1, 3])
def test_tutorial_is_the_plain_loop_and_repeats_whatever_the_threads_do(observers, episodes):
    agent = make_agent(PATH, observers + 1, 1)
    lowest = []
    for _ in range(episodes):
        agent.run_episode()
        lowest.append(agent.finish_episode(0.99))
    expected, parameters = reinforce(1, episodes, observers)
    assert lowest == expected
    assert distance(agent, parameters) < 1e-5
    _, leaked = reinforce(1, 1, observers, leak=True)
    if episodes == 1 and observers == 3:  # as in the tutorial, with rewards of the next observer's episode
        assert distance(agent, leaked) > 1e-3


def test_tutorial_draws_do_not_depend_on_the_order_of_the_observers_calls():
    def actions_of_observer_1(order, shared):
        agent = make_agent(PATH, 3, 1)
        if shared:  # as in the tutorial: all observers draw from one generator
            agent.generators = dict.fromkeys([1, 2], torch.Generator().manual_seed(1))
        state = gym.make("CartPole-v1").reset(seed=1)[0]
        chosen = {1: [], 2: []}
        for _ in range(50):
            for ob_id in order:
                chosen[ob_id].append(agent.select_action(ob_id, state))
        return chosen[1]

    assert actions_of_observer_1([1, 2], False) == actions_of_observer_1([2, 1], False)
    assert actions_of_observer_1([1, 2], True) != actions_of_observer_1([2, 1], True)


def test_tutorial_observers_see_different_starts():
    observers = [handle.value for handle in make_agent(PATH, 3, 1).ob_rrefs]
    first, second = (observer.env.reset()[0].tolist() for observer in observers)
    assert first != second


def test_tutorial_episode_ends_where_the_environment_only_truncates():
    agent = make_agent(PATH, 2, 1)
    handle = agent.ob_rrefs[0]
    handle.value.env = gym.wrappers.TimeLimit(handle.value.env.unwrapped, max_episode_steps=3)
    agent.run_episode()
    assert len(agent.rewards[1]) == 3


def test_tutorial_episode_of_one_step_leaves_the_policy_finite():
    agent = make_agent(PATH, 2, 1)
    agent.select_action(1, gym.make("CartPole-v1").reset(seed=1)[0])
    agent.report_reward(1, 1.0)
    assert agent.finish_episode(0.99) == 1.0
    assert all(parameter.isfinite().all() for parameter in agent.policy.parameters())


WRONG = ["--world_size 1", "--world_size 2 --rank 2", "--world_size 3 --rank -1"]


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


def assert_plays_the_reference(done, observers, episodes):
    expected, _ = reinforce(1, episodes, observers)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "This will run until reward threshold of 475.0 is reached. Ctrl+C to exit."
    assert [float(reward) for _, reward, _ in LINE.findall(done.stdout)] == expected
    assert lines[-1] == f"Not solved after {episodes} episodes."


def test_tutorial_spawned_with_two_observers():
    flags = ("--world_size", 3, "--max_episodes", 5, "--log_interval", 1)
    assert_plays_the_reference(run_spawned(PATH, *flags), 2, 5)


@pytest.mark.slow
def test_tutorial_in_terminals_and_spawned_alone_in_a_folder_with_a_space(tmp_path):
    flags = ("--max_episodes", 5, "--log_interval", 1)
    agent, *observers = run_in_terminals(PATH, 3, *flags)
    assert_plays_the_reference(agent, 2, 5)
    for done in observers:
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    alone = copied_alone(PATH, tmp_path)
    assert_plays_the_reference(run_spawned(alone, *flags, cwd=tmp_path), 1, 5)


@pytest.mark.slow
def test_tutorial_learns():
    """An untrained policy keeps the pole up for about 22 steps."""
    done = run_spawned(PATH, "--max_episodes", 100, "--log_interval", 100, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(LINE.findall(done.stdout)[-1][2]) > 40


def test_single_plays_the_same_as_tutorial():
    done = run_script("rl_rpc/single.py", "--max_episodes", 10)
    assert (done.returncode, done.stderr) == (0, "")
    lowest, _ = reinforce(1, 10, 1)
    assert float(LINE.findall(done.stdout)[-1][1]) == lowest[-1]
