"""rl_rpc/elastic.py: observers that join, leave and are killed, each a command of its own as in a terminal."""

import re
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from helpers import ROOT, load_module
from jobs import free_port
from patches import patched
from processes import wait_until
from programs import Program, Programs
from tutorials import copied_alone
from two_hosts import watched_host

PATH = "rl_rpc/elastic.py"
LINE = re.compile(r"^Episode (\d+)\tAverage reward: ([\d.]+)\t([\d,]+) steps/s\tobservers: (\d+)$", re.M)


class Terminals(Programs):
    """The ranks of one group, each started on its own: group[rank] is a Program."""

    def __init__(self, port=None, by=None):
        """`by`: see Program."""
        super().__init__([])
        self.port, self.by, self.ranks = port or free_port(), by, {}

    def __getitem__(self, rank):
        return self.ranks[rank]

    def start(self, rank, *flags, path=PATH):
        # Unbuffered, so that each line can be read as soon as it is printed.
        how = {"by": self.by, "env": {"PYTHONUNBUFFERED": "1"}}
        self.ranks[rank] = Program(path, "--rank", rank, "--master_port", self.port, *flags, **how)
        self.processes.append(self.ranks[rank])

    def wait_for_updates(self, observers, times=2, seconds=120):
        """Return when the agent has learned a few times more from exactly so many observers."""
        line = f"observers: {observers}\n"
        enough = self[0].output().count(line) + times
        wait_until(lambda: self[0].output().count(line) >= enough, seconds, self.text)


def is_killed_when_it_has_joined(program):
    program.signal.signal = lambda *_: program.os.kill(program.os.getpid(), program.signal.SIGKILL)


def test_elastic_killed_observer_is_replaced(tmp_path):
    """One is killed as a member, and another one when it is on torch's list, but the agent has never heard of it.

    After each of them others can join. At the end the agent is killed.
    """
    with Terminals() as group:
        for rank in (0, 1, 2):
            group.start(rank, *(("--seconds", 600) if rank == 0 else ()))
        assert group[0].wait_for_text("observers: 2\n", 120), group.text()
        group[1].send_signal(signal.SIGKILL)
        assert group[0].wait_for_text("observer1 was lost: ", 120), group.text()
        group.start(3)
        group.wait_for_updates(2)

        group.start(4, path=patched(copied_alone(PATH, tmp_path), is_killed_when_it_has_joined))
        assert group[4].wait() == -signal.SIGKILL
        assert group[0].wait_for_text("observer4 was lost while it joined or left\n"), group.text()
        group.start(5)
        group.wait_for_updates(3)

        group[0].send_signal(signal.SIGKILL)
        for rank in (2, 3, 5):
            assert group[rank].wait() == 1
            assert re.fullmatch(rf"observer{rank} has lost the agent: .+\n", group[rank].errors()), group.text()


def fails_to_play(program):
    def run_episodes(weights):
        raise KeyError("fault")

    program.run_episodes = run_episodes


def test_elastic_alone_in_a_folder_ends_by_ctrl_c(tmp_path):
    """Observers join, leave and fail meanwhile, and a second agent cannot start."""
    path, port = copied_alone(PATH, tmp_path), free_port()  # so it imports nothing of ours
    fails = patched(shutil.copy(path, tmp_path / "fails.py"), fails_to_play)
    with watched_host(port) as by, Terminals(port, by) as group:
        for rank in (0, 1, 2, 4):
            group.start(rank, *(("--seconds", 600) if rank == 0 else ()), path=fails if rank == 4 else path)
        assert group[0].wait_for_text("observer4 has failed: ", 120), group.text()
        assert group[0].wait_for_text("observers: 2\n", 120), group.text()
        assert group[4].wait() == 1
        assert group[4].errors().endswith("observer4 ends: run_episodes has failed, see the agent\n")
        assert "\nKeyError: " in group[0].output() and "observer4 was lost" not in group[0].output()

        assert group[1].wait_for_text("observer1 joined\n", 120), group.text()
        group[1].send_signal(signal.SIGINT)
        assert group[0].wait_for_text("observer1 left", 120), group.text()
        assert group[1].wait() == 0 and "lost" not in group[0].output()
        assert (group[1].output(), group[1].errors()) == ("observer1 joined\nobserver1 left\n", "")

        with Terminals(port, by) as second:
            second.start(0, path=path)
            group.start(1, path=path)  # a number that has been used
            assert second[0].wait() == 1
            assert second[0].errors().startswith("agent cannot join "), second.text()
        assert group[1].wait() == 1
        assert group[1].errors() == "observer1 ends: its --rank has been used before; take another\n"

        group[0].send_signal(signal.SIGINT)
        assert [group[rank].wait() for rank in (0, 2)] == [0, 0], group.text()
        assert group[2].output() == "observer2 joined\nobserver2 left\n"
        assert group[0].errors() == group[2].errors() == "" and LINE.search(group[0].output()), group.text()


@pytest.mark.quick
def test_elastic_ends_at_its_limit():
    module = load_module(ROOT / PATH)
    module.collect_episodes = lambda *_: ([(torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64))], {})
    module.dismiss_all = lambda *_: None
    began = time.monotonic()
    with pytest.raises(SystemExit):
        module.run_agent(1, SimpleNamespace(gone=set(), run=lambda *_: None))
    assert 1 <= time.monotonic() - began < 10


@pytest.mark.quick
def test_elastic_repair_keeps_an_observer_that_joins_at_the_same_time():
    module = load_module(ROOT / PATH)

    class Store(TCPStore):
        """Just before the list is written for the first time, observer 3 joins."""

        def compare_set(self, key, expected, desired):
            if key == listed and b"observer3" not in self.get(key):
                self.set(key, self.get(key).decode() + "observer3-3,")
            return super().compare_set(key, expected, desired)

    listed = module.Repair.LIST
    store = Store("localhost", 0, is_master=True)
    store.set(listed, "agent-0,observer1-1,observer2-2,")
    store.set(module.Repair.LOCK, "Token_for_observer2_join")  # held by a second process of this name
    repair = module.Repair(store)
    repair.gone.add("observer1")
    repair.run({"observer2": None}, {})
    assert store.get(listed) == b"agent-0,observer2-2,observer3-3,"
    assert store.get(module.Repair.LOCK) == b"" and store.check(["rpc_prefix_0/Token_for_observer2_join"])

    # At the end the members go off the list, because who joins from then on must not call them.
    module.rpc = SimpleNamespace(rpc_sync=lambda *_: None, shutdown=lambda graceful: None)
    answer = torch.futures.Future()
    module.dismiss_all({"observer2": answer}, repair)
    assert store.get(listed) == b"agent-0,observer3-3," and answer.value() == (False, None)


@pytest.mark.quick
def test_elastic_learns_as_reinforce_says():
    """One step with the first two episodes that an observer plays, beside the sum over steps written out."""
    torch.manual_seed(1)
    module = load_module(ROOT / PATH)
    module.env.reset(seed=1)
    episodes = module.run_episodes(module.policy.state_dict())[:2]
    lengths = [len(actions) for _, actions in episodes]
    before = [parameter.detach().clone().requires_grad_() for parameter in module.policy.parameters()]
    returns = torch.tensor([sum(0.99**k for k in range(steps - t)) for steps in lengths for t in range(steps)])
    returns = (returns - returns.mean()) / (returns.std() + 1e-7)
    states, actions = (torch.cat(part) for part in zip(*episodes, strict=True))
    scores = torch.relu(states @ before[0].T + before[1]) @ before[2].T + before[3]
    loss = -(torch.log_softmax(scores, dim=1).gather(1, actions).squeeze(1) * returns).sum()
    loss.backward()
    module.finish_episodes(episodes, torch.optim.SGD(module.policy.parameters(), lr=0.1))
    for parameter, old in zip(module.policy.parameters(), before, strict=True):
        assert torch.allclose(parameter, old - 0.1 * old.grad, atol=1e-6)
