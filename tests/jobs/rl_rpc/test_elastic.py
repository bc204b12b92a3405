"""rl_rpc/elastic.py: observers that join, leave and are killed, each a command of its own as in a terminal."""

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
from programs import Program
from tutorials import changed, copied_alone, watched_host

PATH = "rl_rpc/elastic.py"
LINE = re.compile(r"^Episode (\d+)\tAverage reward: ([\d.]+)\t([\d,]+) steps/s\tobservers: (\d+)$", re.M)


class Terminals:
    """The ranks of one group, each started on its own. Nothing of them survives the block."""

    def __init__(self, port=None, by=None):
        """`by`: see Program."""
        self.port, self.by = port or free_port(), by
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()

    def start(self, rank, *flags, path=PATH):
        place = ("--rank", rank, "--master_port", self.port)
        # Unbuffered, so that each line can be read as soon as it is printed.
        self.processes[rank] = Program(path, *place, *flags, by=self.by, env={"PYTHONUNBUFFERED": "1"})

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

    def wait_for_lock(self, rank, seconds=60):
        """Return when observer `rank` has torch's lock, because it joins."""
        store, deadline = TCPStore("localhost", self.port), time.monotonic() + seconds
        key = "rpc_prefix_0/RpcGroupManagementToken"
        while store.get(key) != f"Token_for_observer{rank}_join".encode():
            assert time.monotonic() < deadline and self.processes[rank].poll() is None, self.everything()

    def has_joined(self, rank):
        """Wait until this observer has joined, or has ended with status 1 and has said that it could not."""
        while f"observer{rank} joined" not in self.output(rank) and self.processes[rank].poll() is None:
            time.sleep(0.02)
        if self.processes[rank].poll() is None:
            return True
        assert self.status(rank) == 1, self.everything()
        message = rf"observer{rank} cannot join \(was one killed\?\): .+; try again with another --rank\n"
        assert re.fullmatch(message, self.errors(rank)), self.everything()
        return False


def test_elastic_killed_observer_is_replaced(tmp_path):
    """One is killed while another joins. The one that joins is a member, or ends with status 1 and says what to do.

    Another one is killed when it is on torch's list, but the agent has never heard of it. Afterwards others can join.
    At the end the agent is killed.
    """
    with Terminals() as group:
        for rank in (0, 1, 2):
            group.start(rank, *(("--seconds", 600) if rank == 0 else ()))
        group.wait_for(0, "observers: 2\n")
        group.start(3)
        group.wait_for_lock(3)
        group.send(1, signal.SIGKILL)
        group.wait_for(0, "observer1 was lost: ")
        alive = [2, 3] if group.has_joined(3) else [2]
        group.wait_for_updates(len(alive))

        line = "    signal.signal(signal.SIGINT, "
        killed = (line, f"    os.kill(os.getpid(), signal.SIGKILL)\n{line}")
        group.start(4, path=changed(copied_alone(PATH, tmp_path), killed))
        assert group.status(4) == -signal.SIGKILL
        for rank in (5, 6, 7, 8):
            group.start(rank)
            if group.has_joined(rank):
                alive.append(rank)
                break
        assert "observer4 was lost while it joined or left\n" in group.output(0)
        group.wait_for_updates(len(alive))

        group.send(0, signal.SIGKILL)
        for rank in alive:
            assert group.status(rank) == 1
            assert re.fullmatch(rf"observer{rank} has lost the agent: .+\n", group.errors(rank)), group.everything()


def test_elastic_alone_in_a_folder_learns_and_ends_at_its_limit(tmp_path):
    """Observers join, leave and fail meanwhile, a second agent cannot start, and one observer joins too late.

    A policy that has not learned keeps the pole up for about 22 steps. There is about one update per second.
    """
    path, port = copied_alone(PATH, tmp_path), free_port()  # so it imports nothing of ours
    with watched_host(port) as by, Terminals(port, by) as group:
        for rank, program in enumerate(meeting_at_the_end(path, tmp_path)):
            group.start(rank, *(("--seconds", 60) if rank == 0 else ()), path=program)
        group.wait_for(1, "observer1 joined\n")
        joined = time.monotonic()
        group.wait_for(0, "observers: 2\n")
        group.send(1, signal.SIGINT)
        group.wait_for(0, "observer1 left")
        assert group.status(1) == 0 and "lost" not in group.output(0)
        assert (group.output(1), group.errors(1)) == ("observer1 joined\nobserver1 left\n", "")

        with Terminals(port, by) as second:
            second.start(0, path=path)
            group.start(1, path=path)  # a number that has been used
            assert second.status(0) == 1
            assert second.errors(0).startswith("agent cannot join "), second.everything()
        assert group.status(1) == 1
        assert group.errors(1) == "observer1 ends: its --rank has been used before; take another\n"

        wrong = ("    episodes = []\n    end = ", "    raise KeyError('fault')\n    end = ")
        group.start(4, path=changed(path, wrong))
        group.wait_for(0, "observer4 has failed: ")
        assert group.status(4) == 1
        assert group.errors(4).endswith("observer4 ends: run_episodes has failed, see the agent\n")
        assert "\nKeyError: " in group.output(0) and "observer4 was lost" not in group.output(0)

        group.wait_for(2, "the end has begun\n")
        group.send(3, signal.SIGCONT)
        group.wait_for(0, "observer3 calls join\n")
        os.close(os.open(tmp_path / "go on", os.O_WRONLY))
        assert [group.status(rank) for rank in (0, 2, 3)] == [0, 0, 1], group.everything()
        assert group.errors(3) == "observer3 ends: it has joined too late, the agent has finished\n"
        assert time.monotonic() - joined > 58  # the limit counts from the join, which is seen a little late
        assert group.output(2) == "observer2 joined\nthe end has begun\nobserver2 left\n"
        assert group.errors(0) == group.errors(2) == ""
        averages = [float(average) for _, average, *_ in LINE.findall(group.output(0))]
        assert max(averages) > 60, group.everything()


def meeting_at_the_end(path, folder):
    """Return the programs of four ranks, copies of `path`. Observer 3 joins when the agent's end has begun.

    It stops itself before it joins. Observer 2 hears that it has to leave when a pipe has been opened.
    """
    os.mkfifo(folder / "go on")
    puts, hears, joins = "    newcomers.put((name, answer))\n", "lambda _: dismissed.set()", "        rpc.init_rpc("
    opens = f"print('the end has begun', flush=True), open({str(folder / 'go on')!r}).read()"
    changes = {
        0: (puts, f"{puts}    print(name, 'calls join', flush=True)\n"),
        2: (hears, f"lambda _: ({opens}, dismissed.set())"),
        3: (joins, f"        os.kill(os.getpid(), signal.SIGSTOP)\n{joins}"),
    }
    copies = {rank: shutil.copy(path, folder / f"{rank}.py") for rank in changes}
    return [changed(copies[rank], changes[rank]) if rank in changes else path for rank in range(4)]


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
