"""rl_rpc/elastic.py: observers that join, leave and are killed, each a command of its own as in a terminal."""

import contextlib
import os
import re
import shutil
import signal
import time

import pytest
import torch
from torch.distributed import TCPStore

from helpers import ROOT, load_module
from jobs import free_port
from patches import patched
from programs import Program
from tutorials import copied_alone
from two_hosts import watched_host

PATH = "rl_rpc/elastic.py"
LINE = re.compile(r"^Episode (\d+)\tAverage reward: ([\d.]+)\t([\d,]+) steps/s\tobservers: (\d+)$", re.M)


class Terminals(contextlib.ExitStack):
    """The ranks of one group, each started on its own: group[rank] is a Program. Nothing of them survives the block."""

    def __init__(self, port=None, by=None):
        """`by`: see Program."""
        super().__init__()
        self.port, self.by, self.ranks = port or free_port(), by, {}

    def __getitem__(self, rank):
        return self.ranks[rank]

    def start(self, rank, *flags, path=PATH):
        # Unbuffered, so that each line can be read as soon as it is printed.
        how = {"by": self.by, "env": {"PYTHONUNBUFFERED": "1"}}
        program = Program(path, "--rank", rank, "--master_port", self.port, *flags, **how)
        self.ranks[rank] = self.enter_context(program)

    def everything(self):
        return "".join(f"--- {rank}\n{program.text()}" for rank, program in self.ranks.items())

    def wait_for_updates(self, observers, times=2, seconds=120):
        """Return when the agent has learned a few times more from exactly so many observers."""
        line, deadline = f"observers: {observers}\n", time.monotonic() + seconds
        before = self[0].output().count(line)
        while self[0].output().count(line) < before + times:
            assert time.monotonic() < deadline and self[0].poll() is None, self.everything()
            time.sleep(0.02)

    def wait_for_lock(self, rank, seconds=60):
        """Return when observer `rank` has torch's lock, because it joins."""
        store, deadline = TCPStore("localhost", self.port), time.monotonic() + seconds
        key = "rpc_prefix_0/RpcGroupManagementToken"
        while store.get(key) != f"Token_for_observer{rank}_join".encode():
            assert time.monotonic() < deadline and self[rank].poll() is None, self.everything()

    def has_joined(self, rank):
        """Wait until this observer has joined, or has ended with status 1 and has said that it could not."""
        if self[rank].wait_for_text(f"observer{rank} joined", 120):
            return True
        message = rf"observer{rank} cannot join \(was one killed\?\): .+; try again with another --rank\n"
        assert self[rank].wait() == 1 and re.fullmatch(message, self[rank].errors()), self.everything()
        return False


def is_killed_when_it_has_joined(program):
    program.signal.signal = lambda *_: program.os.kill(program.os.getpid(), program.signal.SIGKILL)


def test_elastic_killed_observer_is_replaced(tmp_path):
    """One is killed while another joins. The one that joins is a member, or ends with status 1 and says what to do.

    Another one is killed when it is on torch's list, but the agent has never heard of it. Afterwards others can join.
    At the end the agent is killed.
    """
    with Terminals() as group:
        for rank in (0, 1, 2):
            group.start(rank, *(("--seconds", 600) if rank == 0 else ()))
        assert group[0].wait_for_text("observers: 2\n", 120), group.everything()
        group.start(3)
        group.wait_for_lock(3)
        group[1].send_signal(signal.SIGKILL)
        assert group[0].wait_for_text("observer1 was lost: ", 120), group.everything()
        alive = [2, 3] if group.has_joined(3) else [2]
        group.wait_for_updates(len(alive))

        group.start(4, path=patched(copied_alone(PATH, tmp_path), is_killed_when_it_has_joined))
        assert group[4].wait() == -signal.SIGKILL
        for rank in (5, 6, 7, 8):
            group.start(rank)
            if group.has_joined(rank):
                alive.append(rank)
                break
        assert "observer4 was lost while it joined or left\n" in group[0].output()
        group.wait_for_updates(len(alive))

        group[0].send_signal(signal.SIGKILL)
        for rank in alive:
            assert group[rank].wait() == 1
            assert re.fullmatch(rf"observer{rank} has lost the agent: .+\n", group[rank].errors()), group.everything()


def fails_to_play(program):
    def run_episodes(weights):
        raise KeyError("fault")

    program.run_episodes = run_episodes


def test_elastic_alone_in_a_folder_learns_and_ends_at_its_limit(tmp_path):
    """Observers join, leave and fail meanwhile, a second agent cannot start, and one observer joins too late.

    A policy that has not learned keeps the pole up for about 22 steps. There is about one update per second.
    """
    path, port = copied_alone(PATH, tmp_path), free_port()  # so it imports nothing of ours
    with watched_host(port) as by, Terminals(port, by) as group:
        for rank, program in enumerate(meeting_at_the_end(path, tmp_path)):
            group.start(rank, *(("--seconds", 60) if rank == 0 else ()), path=program)
        assert group[1].wait_for_text("observer1 joined\n", 120), group.everything()
        joined = time.monotonic()
        assert group[0].wait_for_text("observers: 2\n", 120), group.everything()
        group[1].send_signal(signal.SIGINT)
        assert group[0].wait_for_text("observer1 left", 120), group.everything()
        assert group[1].wait() == 0 and "lost" not in group[0].output()
        assert (group[1].output(), group[1].errors()) == ("observer1 joined\nobserver1 left\n", "")

        with Terminals(port, by) as second:
            second.start(0, path=path)
            group.start(1, path=path)  # a number that has been used
            assert second[0].wait() == 1
            assert second[0].errors().startswith("agent cannot join "), second.everything()
        assert group[1].wait() == 1
        assert group[1].errors() == "observer1 ends: its --rank has been used before; take another\n"

        group.start(4, path=patched(path, fails_to_play))
        assert group[0].wait_for_text("observer4 has failed: ", 120), group.everything()
        assert group[4].wait() == 1
        assert group[4].errors().endswith("observer4 ends: run_episodes has failed, see the agent\n")
        assert "\nKeyError: " in group[0].output() and "observer4 was lost" not in group[0].output()

        assert group[2].wait_for_text("the end has begun\n", 120), group.everything()
        group[3].send_signal(signal.SIGCONT)
        assert group[0].wait_for_text("observer3 calls join\n", 120), group.everything()
        os.close(os.open(tmp_path / "go on", os.O_WRONLY))
        assert [group[rank].wait() for rank in (0, 2, 3)] == [0, 0, 1], group.everything()
        assert group[3].errors() == "observer3 ends: it has joined too late, the agent has finished\n"
        assert time.monotonic() - joined > 58  # the limit counts from the join, which is seen a little late
        assert group[2].output() == "observer2 joined\nthe end has begun\nobserver2 left\n"
        assert group[0].errors() == group[2].errors() == ""
        averages = [float(average) for _, average, *_ in LINE.findall(group[0].output())]
        assert max(averages) > 60, group.everything()


def meeting_at_the_end(path, folder):
    """Return the programs of four ranks, copies of `path`. Observer 3 joins when the agent's end has begun.

    It stops itself before it joins. Observer 2 hears that it has to leave when a pipe has been opened.
    """
    os.mkfifo(folder / "go on")
    agent, observer2, observer3 = (shutil.copy(path, folder / f"{rank}.py") for rank in (0, 2, 3))
    observer2 = patched(observer2, leaves_late, pipe=str(folder / "go on"))
    return [patched(agent, says_who_calls_join), path, observer2, patched(observer3, stops_before_it_joins)]


def says_who_calls_join(program):
    class Newcomers(program.queue.SimpleQueue):
        def put(self, newcomer):
            super().put(newcomer)
            print(newcomer[0], "calls join", flush=True)

    program.newcomers = Newcomers()


def leaves_late(program, pipe):
    set_at_once = program.dismissed.set

    def set_when_the_pipe_was_opened():
        print("the end has begun", flush=True)
        open(pipe).read()
        set_at_once()

    program.dismissed.set = set_when_the_pipe_was_opened


def stops_before_it_joins(program):
    join = program.rpc.init_rpc

    def init_rpc(*arguments, **how):
        program.os.kill(program.os.getpid(), program.signal.SIGSTOP)
        join(*arguments, **how)

    program.rpc.init_rpc = init_rpc


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


@pytest.mark.quick
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
