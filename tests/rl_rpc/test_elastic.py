"""rl_rpc/elastic.py: observers that join, leave and are killed, each a command of its own as in a terminal."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from helpers import ROOT, WarmCommand, load_module, read_whole
from jobs import free_port
from tutorials import copied_alone

PATH = "rl_rpc/elastic.py"
LINE = re.compile(r"^Episode (\d+)\tAverage reward: ([\d.]+)\t([\d,]+) steps/s\tobservers: (\d+)$", re.M)


class Terminals:
    """The ranks of one group, each started on its own. Nothing of them survives the block.

    With `warm`, each rank is a fork of a process that has loaded torch, because loading it takes longer than the test.
    """

    def __init__(self, folder, warm):
        self.folder = folder
        self.warm = warm
        self.script = ROOT / PATH
        self.port = str(free_port())
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, rank, *flags):
        command = [sys.executable, self.script, "--rank", rank, "--master_port", self.port, *flags]
        command = [str(word) for word in command]
        with open(self.folder / f"{rank}.out", "w") as out, open(self.folder / f"{rank}.err", "w") as err:
            env = {"PYTHONUNBUFFERED": "1"}  # so that each line can be read as soon as it is printed
            if self.warm:
                self.processes[rank] = WarmCommand(command, out.name, err.name, env=env)
            else:
                self.processes[rank] = subprocess.Popen(
                    command, stdout=out, stderr=err, start_new_session=True, env=os.environ | env
                )

    def output(self, rank):
        return read_whole(self.folder / f"{rank}.out")

    def errors(self, rank):
        return read_whole(self.folder / f"{rank}.err")

    def everything(self):
        return "".join(f"--- {rank}\n{self.output(rank)}{self.errors(rank)}" for rank in self.processes)

    def wait_for(self, rank, text, seconds=120, times=1):
        """Return when this rank has printed `text` so many times."""
        deadline = time.monotonic() + seconds
        while self.output(rank).count(text) < times:
            ended = self.processes[rank].poll() is not None and self.output(rank).count(text) < times
            assert not ended and time.monotonic() < deadline, f"no {text!r} of rank {rank}:\n{self.everything()}"
            time.sleep(0.02)

    def status(self, rank, seconds=120):
        """Wait until this rank has ended; return its exit status."""
        try:
            return self.processes[rank].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} still runs:\n{self.everything()}") from None

    def send(self, rank, number):
        self.processes[rank].send_signal(number)


@pytest.fixture
def terminals(tmp_path, request):
    """The slow tests start each rank as a user does."""
    with Terminals(tmp_path, warm=not request.node.get_closest_marker("slow")) as group:
        yield group


def test_elastic_observers_join_and_leave_and_the_agent_ends_the_job(terminals):
    for rank in (0, 1, 2):
        terminals.start(rank)
    terminals.wait_for(0, "observer1 joined")
    terminals.wait_for(0, "observer2 joined")
    terminals.wait_for(0, "observers: 2")
    terminals.send(1, signal.SIGINT)
    terminals.wait_for(0, "observer1 left")
    terminals.start(3)
    terminals.wait_for(0, "observer3 joined")
    assert terminals.status(1) == 0
    terminals.send(0, signal.SIGINT)
    assert [terminals.status(rank) for rank in (0, 2, 3)] == [0, 0, 0], terminals.everything()
    for rank in (1, 2, 3):
        assert terminals.output(rank) == f"observer{rank} joined\nobserver{rank} left\n"
        assert terminals.errors(rank) == ""
    assert terminals.errors(0) == "" and "lost" not in terminals.output(0)


def test_elastic_alone_in_a_folder_ends_after_max_episodes(terminals, tmp_path):
    terminals.script = copied_alone(PATH, tmp_path)  # so it imports nothing of ours
    terminals.start(0, "--max_episodes", 1)
    terminals.start(1)
    assert [terminals.status(rank) for rank in (0, 1)] == [0, 0], terminals.everything()
    assert re.fullmatch(r"Waiting for .+\nobserver1 joined\nEpisode \d+\t.+\tobservers: 1\n", terminals.output(0))
    assert terminals.output(1) == "observer1 joined\nobserver1 left\n"


def test_elastic_has_no_long_lines():
    assert [line for line in (ROOT / PATH).read_text().splitlines() if len(line) > 100] == []


@pytest.mark.parametrize("flags", ["", "--rank -1", "--rank 0 --seconds 0", "--rank 0 --max_episodes 0"])
def test_elastic_refuses_what_cannot_work(monkeypatch, capsys, flags):
    monkeypatch.setattr(sys, "argv", [PATH, *flags.split()])
    with pytest.raises(SystemExit) as refused:
        load_module(ROOT / PATH).parse_args()
    assert refused.value.code == 2 and "error: " in capsys.readouterr().err


def test_elastic_learns_as_reinforce_says():
    """One step with two episodes of different lengths, beside the sum over steps written out."""
    module = load_module(ROOT / PATH)
    generator = torch.Generator().manual_seed(1)
    episodes = []
    for steps in (3, 5):
        states = torch.randn(steps, 4, generator=generator)
        actions = torch.randint(2, (steps, 1), generator=generator)
        episodes.append((states, actions))
    before = [parameter.detach().clone().requires_grad_() for parameter in module.policy.parameters()]
    returns = torch.tensor([sum(0.99**k for k in range(steps - t)) for steps in (3, 5) for t in range(steps)])
    returns = (returns - returns.mean()) / (returns.std() + 1e-7)
    loss = 0
    for (state, action), weight in zip(
        [(state, action) for states, actions in episodes for state, action in zip(states, actions, strict=True)],
        returns,
        strict=True,
    ):
        scores = torch.relu(state @ before[0].T + before[1]) @ before[2].T + before[3]
        loss = loss - torch.log_softmax(scores, dim=0)[action.item()] * weight
    loss.backward()
    module.finish_episodes(episodes, torch.optim.SGD(module.policy.parameters(), lr=0.1))
    for parameter, old in zip(module.policy.parameters(), before, strict=True):
        assert torch.allclose(parameter, old - 0.1 * old.grad, atol=1e-6)


@pytest.mark.slow
def test_elastic_goes_on_after_a_kill_but_nobody_can_join(terminals):
    for rank in (0, 1, 2):
        terminals.start(rank)
    terminals.wait_for(0, "observers: 2")
    terminals.send(1, signal.SIGKILL)
    terminals.wait_for(0, "observer1 was lost: ")
    terminals.wait_for(0, "observers: 1")
    terminals.start(3)
    terminals.start(4)
    for rank in (3, 4):
        assert terminals.status(rank) == 1
        said = rf"observer{rank} cannot join \(was one killed\?\): wait timeout after 10000ms, keys: \S+_join\n"
        assert re.fullmatch(said, terminals.errors(rank)), terminals.everything()
    seen = terminals.output(0).count("observers: 1")
    terminals.wait_for(0, "observers: 1", times=seen + 1)  # the agent has gone on meanwhile
    terminals.send(2, signal.SIGINT)
    assert terminals.status(2, seconds=9) == 0  # it tells nobody: that would fail
    terminals.wait_for(0, "observer2 left")
    terminals.send(0, signal.SIGINT)
    assert terminals.status(0, seconds=9) == 0
    assert terminals.errors(0) == terminals.errors(2) == ""


@pytest.mark.slow
def test_elastic_agent_that_has_seen_no_observer_says_so(terminals):
    terminals.start(0)
    terminals.wait_for(0, "Waiting for observers.")
    terminals.send(0, signal.SIGINT)
    assert (terminals.status(0), terminals.errors(0)) == (1, "no observer has joined\n")


@pytest.mark.slow
def test_elastic_observers_end_when_the_agent_is_killed(terminals):
    for rank in (0, 1, 2):
        terminals.start(rank)
    terminals.wait_for(0, "observers: 2")
    terminals.send(0, signal.SIGKILL)
    for rank in (1, 2):
        assert terminals.status(rank) == 1
        assert re.fullmatch(rf"observer{rank} has lost the agent: .+\n", terminals.errors(rank)), terminals.everything()


@pytest.mark.slow
def test_elastic_learns_and_takes_no_rank_twice(terminals):
    """A policy that has not learned keeps the pole up for about 22 steps."""
    terminals.start(0, "--seconds", 60)
    terminals.start(1)
    terminals.wait_for(0, "observers: 1")
    terminals.send(1, signal.SIGINT)
    assert terminals.status(1) == 0
    terminals.start(1)
    assert terminals.status(1) == 1
    assert terminals.errors(1) == "observer1 ends: its --rank has been used before; take another\n"
    terminals.start(2)  # the agent waits for it
    assert [terminals.status(rank) for rank in (0, 2)] == [0, 0], terminals.everything()
    assert "lost" not in terminals.output(0)
    assert max(float(average) for _, average, _, _ in LINE.findall(terminals.output(0))) > 100
