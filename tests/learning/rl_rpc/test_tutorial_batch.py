"""rl_rpc/tutorial_batch.py: its results are compared with a plain loop and with the page's code; its command is run."""

import re
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import pytest
import torch

from helpers import largest_difference, load_oracle
from patches import patched
from tutorials import copied_alone, run_in_terminals, run_spawned

oracle = load_oracle("rl_rpc")
PATH = "rl_rpc/tutorial_batch.py"
TIMES = re.compile(r"^(\d+), [\d.]+, [\d.]+$", re.M)
quick = pytest.mark.quick


def make_agent(observers, batch):
    """With batching, observers must play at once; without, they play in turn, so that draws are always the same."""
    return oracle.tutorial_agent(PATH, observers + 1, batch, 1.0, 1, in_turn=not batch)


def reinforce(observers, episodes, steps):
    """Run the page's REINFORCE in one process, so many steps of each observer an episode.

    Return the parameters, and the mean length of the first games of each episode.
    """
    torch.manual_seed(1)
    layers = torch.nn.Linear(4, 128), torch.nn.Dropout(0.6), torch.nn.ReLU(), torch.nn.Linear(128, 2)
    policy = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    envs = [gym.make("CartPole-v1") for _ in range(observers)]
    for seed, env in enumerate(envs, start=1):
        env.reset(seed=seed)
    means = []
    for _ in range(episodes):
        log_probs, lengths, firsts = [], [], []  # the lengths of the games
        for env in envs:
            state, _ = env.reset()
            firsts.append(len(lengths))
            lengths.append(0)
            for step in range(1, steps + 1):
                scores = policy(torch.from_numpy(state).unsqueeze(0))
                distribution = torch.distributions.Categorical(torch.softmax(scores, dim=1))
                action = distribution.sample()
                log_probs.append(distribution.log_prob(action))
                state, _, terminated, truncated, _ = env.step(action.item())  # the reward is 1
                lengths[-1] += 1
                if terminated or truncated or step == steps:
                    state, _ = env.reset()
                    lengths.append(0)
        returns = torch.tensor([float(left) for length in lengths for left in range(length, 0, -1)])
        optimizer.zero_grad()
        (-torch.cat(log_probs) * returns / observers).sum().backward()
        optimizer.step()
        means.append(sum(lengths[first] for first in firsts) / observers)
    return list(policy.parameters()), means


@quick
@pytest.mark.parametrize("batch, observers", [(True, 1), (False, 2)])
def test_batch_page_is_the_plain_loop(batch, observers):
    """Each observer has its own seed, and is credited with its own rewards.

    Without batching, the published code multiplies (N, T, 1) by (T, N): each step by all observers' rewards.
    """
    agent = make_agent(observers, batch)
    reported = [agent.run_episode(100)[0] for _ in range(2)]
    parameters, means = reinforce(observers, episodes=2, steps=100)
    assert largest_difference(agent.policy.parameters(), parameters) < 1e-4
    assert reported == means


def ask_together(agent, states, rounds=1):
    """Let all observers ask for actions at the same time, each in its own thread; return the answers, by observer."""

    def ask(ob_id):
        answers = []
        for _ in range(rounds):
            try:
                answers.append(agent.select_action_batch(agent.agent_rref, ob_id, states[ob_id]).wait())
            except Exception as error:
                answers.append(error)
        return answers

    with ThreadPoolExecutor(len(states)) as threads:
        return [*threads.map(ask, range(len(states)))]


@quick
def test_batch_page_gives_each_observer_the_action_for_its_own_state():
    agent = make_agent(8, True)
    agent.policy = lambda x_N14: torch.stack([x_N14[:, :, 0] < 0, x_N14[:, :, 0] > 0], dim=2).float()
    states = [torch.full((1, 4), 1.0 if ob_id % 3 == 0 else -1.0) for ob_id in range(8)]
    answers = ask_together(agent, states, rounds=200)
    assert answers == [[int(ob_id % 3 == 0)] * 200 for ob_id in range(8)]
    assert [len(log_probs) for log_probs in agent.saved_log_probs] == [8] * 200


@quick
def test_batch_page_tells_all_observers_of_an_error():
    """In the published code the last observer that asks gets it, and the others wait until their RPCs time out."""
    agent = make_agent(3, True)

    def diverged(x_N14):
        raise ValueError("nan")

    agent.policy = diverged
    answers = ask_together(agent, [torch.zeros(1, 4)] * 3)
    assert all("nan" in str(error) for (error,) in answers)


def shorter_and_says_what_it_asks(program):
    """Episodes are short, and each observer prints the method that it calls."""
    program.NUM_STEPS = 50
    make = program.Observer.__init__

    def make_and_print(self, *arguments):
        make(self, *arguments)
        print(self.select_action.__name__)

    program.Observer.__init__ = make_and_print


@quick
def test_batch_page_alone_in_a_folder_with_a_space_runs_both_jobs(tmp_path):
    program = patched(copied_alone(PATH, tmp_path), shorter_and_says_what_it_asks)
    done = run_spawned(program, "--world_size", 2, "--num_episode", 2, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert TIMES.findall(done.stdout) == ["2"]
    episodes = [number for number, _, _ in oracle.EPISODE_LINE.findall(done.stdout)]
    assert episodes == ["0", "1"] * 2  # with and without batching
    assert re.findall("^select_action.*", done.stdout, re.M) == ["select_action_batch", "select_action"]


def test_batch_page_in_terminals(tmp_path):
    program = patched(copied_alone(PATH, tmp_path), shorter_and_says_what_it_asks)
    agent, *observers = run_in_terminals(program, 3, "--num_episode", 1)
    assert (agent.returncode, agent.stderr) == (0, "") and oracle.EPISODE_LINE.fullmatch(agent.stdout.strip())
    for done in observers:
        assert (done.returncode, done.stdout, done.stderr) == (0, "select_action_batch\n", "")
