"""rl_rpc/elastic.py: observers that join, leave and are killed, each a command of its own as in a terminal."""

import re
import signal
import sys
import time

import pytest
import torch
from torch.distributed import TCPStore

from helpers import ROOT, load_module
from jobs import free_port
from programs import Program, run_script
from tutorials import copied_alone

PATH = "rl_rpc/elastic.py"
LINE = re.compile(r"^Episode (\d+)\tAverage reward: ([\d.]+)\t([\d,]+) steps/s\tobservers: (\d+)$", re.M)


class Terminals:
    """The ranks of one group, each started on its own. Nothing of them survives the block.

    `cold`: see Program.
    """

    def __init__(self, cold):
        self.cold = cold
        self.script = PATH
        self.port = free_port()
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()

    def start(self, rank, *flags):
        place = ("--rank", rank, "--master_port", self.port)
        # Unbuffered, so that each line can be read as soon as it is printed.
        environ = {"PYTHONUNBUFFERED": "1"}
        self.processes[rank] = Program(self.script, *place, *flags, env=environ, cold=self.cold)

    def output(self, rank):
        return self.processes[rank].output()

    def errors(self, rank):
        return self.processes[rank].errors()

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
        return self.processes[rank].wait(seconds)

    def send(self, rank, number):
        self.processes[rank].send_signal(number)

    def wait_for_updates(self, observers, times=2):
        """Return when the agent has learned a few times more from exactly so many observers."""
        line = f"observers: {observers}\n"
        self.wait_for(0, line, times=self.output(0).count(line) + times)

    def kill(self, rank):
        self.send(rank, signal.SIGKILL)
        assert self.status(rank) in (-signal.SIGKILL, 128 + signal.SIGKILL)

    def end(self, *ranks):
        """End the job; the agent and these observers, which are all that are left, end well."""
        self.send(0, signal.SIGINT)
        assert [self.status(rank) for rank in (0, *ranks)] == [0] * (1 + len(ranks)), self.everything()
        assert "".join(self.errors(rank) for rank in (0, *ranks)) == ""

    def wait_for_lock(self, rank, seconds=60):
        """Return when observer `rank` has torch's lock, because it joins."""
        store, deadline = TCPStore("localhost", self.port), time.monotonic() + seconds
        key = "rpc_prefix_0/RpcGroupManagementToken"
        while store.get(key) != f"Token_for_observer{rank}_join".encode():
            assert time.monotonic() < deadline and self.processes[rank].poll() is None, self.everything()

    def start_until_one_joins(self, ranks):
        """Start observers one after another until one of them joins; return its rank. Those that cannot say so."""
        for rank in ranks:
            self.start(rank)
            if self.has_joined(rank):
                return rank
        raise AssertionError(self.everything())

    def has_joined(self, rank):
        """Wait until this observer has joined, or has ended with status 1 and has said that it could not."""
        while f"observer{rank} joined" not in self.output(rank) and self.processes[rank].poll() is None:
            time.sleep(0.02)
        if self.processes[rank].poll() is None:
            return True
        self.assert_could_not_join(rank)
        return False

    def assert_could_not_join(self, rank):
        assert self.status(rank) == 1, self.everything()
        message = rf"observer{rank} cannot join \(was one killed\?\): .+; try again with another --rank\n"
        assert re.fullmatch(message, self.errors(rank)), self.everything()

    def copy_with(self, old, new, folder):
        """Start from a copy of the program from now on, in which a line is changed."""
        text = (ROOT / PATH).read_text()
        assert text.count(old) == 1
        self.script = folder / "elastic.py"
        self.script.write_text(text.replace(old, new))


@pytest.fixture
def terminals(request):
    """One test starts each rank as a user does."""
    with Terminals(cold=request.node.name == "test_elastic_learns") as group:
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


@pytest.mark.parametrize("limit", [("--max_episodes", 1), ("--seconds", 1)])
def test_elastic_alone_in_a_folder_ends_at_its_limit(terminals, tmp_path, limit):
    """After one update, because observers play for a second at least."""
    terminals.script = copied_alone(PATH, tmp_path)  # so it imports nothing of ours
    terminals.start(0, *limit)
    terminals.start(1)
    assert [terminals.status(rank) for rank in (0, 1)] == [0, 0], terminals.everything()
    assert re.fullmatch(r"Waiting for .+\nobserver1 joined\nEpisode \d+\t.+\tobservers: 1\n", terminals.output(0))
    assert terminals.output(1) == "observer1 joined\nobserver1 left\n"


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


def start_with(terminals, observers):
    """Start the agent and this many observers; return when the agent learns from all of them."""
    for rank in range(observers + 1):
        terminals.start(rank, *(("--seconds", 600) if rank == 0 else ()))
    terminals.wait_for(0, f"observers: {observers}\n")


def test_elastic_killed_observer_is_replaced(terminals):
    start_with(terminals, 2)
    terminals.kill(1)
    terminals.wait_for(0, "observer1 was lost: ")
    terminals.start(3)
    terminals.wait_for(0, "observer3 joined")
    terminals.wait_for_updates(2)
    terminals.send(2, signal.SIGINT)  # it leaves and tells nobody, and another one can join even so
    assert terminals.status(2) == 0
    terminals.start(4)
    terminals.wait_for(0, "observer4 joined")
    terminals.end(3, 4)


@pytest.mark.slow
@pytest.mark.draw(2, "repairs of the group")
def test_elastic_eight_kills_and_eight_new_observers(terminals):
    start_with(terminals, 2)
    for killed in range(1, 9):
        terminals.kill(killed)
        terminals.wait_for(0, f"observer{killed} was lost: ")
        terminals.start(killed + 2)
        terminals.wait_for(0, f"observer{killed + 2} joined")
    terminals.wait_for_updates(2, times=3)
    averages = [float(average) for _, average, _, _ in LINE.findall(terminals.output(0))]
    assert max(averages) > 1.5 * averages[0], averages  # it has learned meanwhile
    terminals.end(9, 10)


@pytest.mark.slow
@pytest.mark.draw(2, "repairs of the group")
def test_elastic_two_killed_at_once(terminals):
    start_with(terminals, 3)
    for rank in (1, 2):
        terminals.send(rank, signal.SIGKILL)
    for rank in (1, 2):
        terminals.wait_for(0, f"observer{rank} was lost: ")
    terminals.wait_for_updates(1)
    terminals.start(4)
    terminals.start(5)
    terminals.wait_for(0, "observer4 joined")
    terminals.wait_for(0, "observer5 joined")
    terminals.wait_for_updates(3)
    terminals.end(3, 4, 5)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before it has torch's lock", "while it has torch's lock"])
@pytest.mark.draw(2, "repairs of the group")
def test_elastic_kill_while_another_joins(terminals, moment):
    """The agent goes on with the survivors. The one that joins is a member, or ends with status 1 and says what to do.

    In both cases another observer can join afterwards. Two kills, because the order of events differs.
    """
    start_with(terminals, 2)
    alive = [1, 2]
    for joins in (3, 5):
        killed = alive.pop(0)
        terminals.start(joins)
        if moment.startswith("while"):
            terminals.wait_for_lock(joins)
        terminals.kill(killed)
        terminals.wait_for(0, f"observer{killed} was lost: ")
        if terminals.has_joined(joins):
            alive.append(joins)
        terminals.wait_for_updates(len(alive))
        terminals.start(joins + 1)
        terminals.wait_for(0, f"observer{joins + 1} joined")
        alive.append(joins + 1)
        terminals.wait_for_updates(len(alive))
    terminals.end(*alive)


@pytest.mark.slow
@pytest.mark.draw(2, "repairs of the group")
def test_elastic_failed_join_is_repaired(terminals):
    """A member that is stopped does not answer a process that joins, so the join fails, and keeps torch's lock."""
    start_with(terminals, 2)
    terminals.send(1, signal.SIGSTOP)
    terminals.start(3)
    terminals.assert_could_not_join(3)
    terminals.wait_for(0, "observer1 was lost: ")
    terminals.start(4)
    terminals.wait_for(0, "observer4 joined")
    terminals.end(2, 4)


@pytest.mark.slow
def test_elastic_shows_an_error_of_run_episodes(terminals, tmp_path):
    """One observer has a program with a fault: the agent shows where, and it is not called lost."""
    start_with(terminals, 1)
    terminals.copy_with("    episodes = []\n    end = ", "    raise KeyError('fault')\n    end = ", tmp_path)
    terminals.start(2)
    terminals.wait_for(0, "observer2 has failed: ")
    assert terminals.status(2) == 1
    assert terminals.errors(2).endswith("observer2 ends: run_episodes has failed, see the agent\n")
    assert "\nKeyError: " in terminals.output(0) and "lost" not in terminals.output(0)
    terminals.end(1)


@pytest.mark.slow
@pytest.mark.draw(2, "repairs of the group")
def test_elastic_killed_while_it_has_the_lock(terminals):
    """A member that is stopped keeps the one that joins waiting, so the kill hits it while it has the lock."""
    start_with(terminals, 2)
    terminals.send(1, signal.SIGSTOP)
    terminals.start(3)
    terminals.wait_for_lock(3)
    terminals.kill(3)
    terminals.send(1, signal.SIGCONT)
    terminals.wait_for_updates(2)  # it was stopped for a moment only, and nobody is lost
    joined = terminals.start_until_one_joins((4, 5, 6, 7))
    assert "observer3 was lost while it joined or left\n" in terminals.output(0)
    terminals.wait_for_updates(3)
    terminals.end(1, 2, joined)


@pytest.mark.slow
@pytest.mark.draw(2, "repairs of the group")
def test_elastic_killed_when_it_is_in_the_group_but_not_yet_a_member(terminals, tmp_path):
    """It is on torch's list, and the agent has never heard of it. So nobody could join if it stayed there."""
    start_with(terminals, 1)
    line = "        store = TCPStore(*address)  # a second"
    terminals.copy_with(line, "        os.kill(os.getpid(), signal.SIGKILL)\n" + line, tmp_path)
    terminals.start(2)
    assert terminals.status(2) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    terminals.script = PATH
    joined = terminals.start_until_one_joins((3, 4, 5, 6))
    assert "observer2 was lost while it joined or left\n" in terminals.output(0)
    terminals.wait_for_updates(2)
    terminals.end(1, joined)


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
def test_elastic_a_second_process_of_a_living_rank_changes_nothing(terminals):
    terminals.start(0)
    terminals.start(1)
    terminals.wait_for(0, "observers: 1")
    second = run_script(PATH, "--rank", 1, "--master_port", terminals.port)
    assert second.returncode == 1 and "try again with another --rank" in second.stderr, second.stderr
    terminals.start(2)  # it calls everyone on the list of members
    terminals.wait_for(0, "observers: 2")
    listed = TCPStore("localhost", terminals.port).get("rpc_prefix_0/names/_ALL_WORKER_INFOS").decode()
    assert "observer1-" in listed and "observer2-" in listed
    terminals.end(1, 2)


@pytest.mark.slow
def test_elastic_takes_no_rank_twice(terminals):
    terminals.start(0)
    terminals.start(1)
    terminals.wait_for(0, "observers: 1")
    terminals.send(1, signal.SIGINT)
    assert terminals.status(1) == 0
    terminals.start(1)
    assert terminals.status(1) == 1
    assert terminals.errors(1) == "observer1 ends: its --rank has been used before; take another\n"
    terminals.start(2)  # the agent waits for it
    terminals.wait_for_updates(1)
    terminals.end(2)
    assert "lost" not in terminals.output(0)


@pytest.mark.slow
@pytest.mark.draw(4, "programs in one file")
def test_elastic_learns(terminals):
    """A policy that has not learned keeps the pole up for about 22 steps."""
    terminals.start(0, "--seconds", 200)
    terminals.start(1)
    while max([0.0, *(float(average) for _, average, _, _ in LINE.findall(terminals.output(0)))]) < 100:
        assert terminals.processes[0].poll() is None, terminals.everything()
        time.sleep(0.05)
    terminals.end(1)
    assert "lost" not in terminals.output(0)
