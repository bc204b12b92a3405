"""param_server's checkpoints: written when all trainers wait, and resumed with any number of servers."""

import itertools
import re
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import ROOT, load_module

test_server = load_module(ROOT / "tests" / "learning" / "param_server" / "test_server.py")
few_test_images = test_server.few_test_images  # a fixture
coordinator, remote, replica = test_server.coordinator, test_server.remote, test_server.replica
checkpoint = coordinator.checkpoint
BATCHES = 12  # in an epoch


class SmallNet(nn.Module):
    """A small network. The code of checkpoints does not depend on the size of the network."""

    def __init__(self, num_gpus=0):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 16), nn.Linear(16, 10)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    monkeypatch.setattr(remote, "Net", SmallNet)
    monkeypatch.setattr(replica, "Net", SmallNet)


class Interrupted(Exception):
    """Simulates a SIGKILL."""


class Players(test_server.Job):
    """A job in this process, whose trainers take turns. Each batch has a gradient of its own."""

    def __init__(self, monkeypatch, *flags):
        super().__init__(*flags, batches=BATCHES, patch=monkeypatch)
        self.answers = {}  # {trainer: Futures of its last push, one of each server}

    def make_update(self, trainer, batch):
        if self.args.mode == "remote":
            self.server.forward(trainer, torch.zeros(4, 1, 28, 28))
            for param in self.server.model.parameters():
                param.grad = torch.full_like(param, 0.01 * batch)
            self.server.apply_gradients(trainer)
            return
        servers = range(len(self.servers))
        versions = [future.value()[0] for future in self.answers.get(trainer, [])]
        versions = versions or [server.pull()[0] for server in self.servers]
        self.answers[trainer] = [self.push(trainer, versions[each], 0.01 * batch, server=each) for each in servers]

    def play(self, lose=None):
        """Let the trainers work until the job ends. If one of them is to be lost, it is lost after its first batch."""
        while batches := self.next_batches():
            for turn in range(max(map(len, batches.values()))):
                for trainer in [each for each in batches if each in self.assignments.living]:
                    if turn < len(batches[trainer]):
                        self.make_update(trainer, batches[trainer][turn])
                if lose in self.assignments.living and turn == 0:
                    self.coordinator.on_lost(lose)
        return self

    def next_batches(self):
        """Return {trainer: the numbers of the batches in its assignment}."""
        self.answers = {}
        return {trainer: assignment.batches for trainer, assignment in self.assign().items() if assignment}

    def weights(self):
        """Return all weights as one tensor."""
        if self.args.mode == "remote":
            return nn.utils.parameters_to_vector(self.server.model.parameters()).detach().clone()
        return torch.cat([server.sgd.weights for server in self.servers])


def flags_of(mode, path, *more):
    """`mode`: remote, or a consistency and the number of servers."""
    flags = ("--mode", "remote", "--world_size", 3)
    if mode != "remote":
        consistency, servers = mode.split()
        flags = ("--mode", "replica", "--consistency", consistency, "--num_servers", servers)
        flags = (*flags, "--world_size", int(servers) + 2)
    return (*flags, "--epochs", 2, "--momentum", 0.5, "--checkpoint", path, *more)


def saved(path):
    _, state = checkpoint.load(path, "param_server")
    return state


def numbers_in(state):
    """Return all weights and momentums of a checkpoint, as one tensor."""
    momentums = state.get("momentum")
    if momentums is None:
        by_param = state["optimizer"]["state"]
        momentums = torch.cat([by_param[place]["momentum_buffer"].reshape(-1) for place in sorted(by_param)])
    weights = [each.reshape(-1) for each in state["model"].values()]
    assert momentums.abs().sum() > 0
    return torch.cat([*weights, momentums])


def assert_same_state(path, expected_path):
    """Assert that progress, weights and momentum are equal to the bit."""
    found, expected = saved(path), saved(expected_path)
    assert found["progress"] == expected["progress"]
    assert torch.equal(numbers_in(found), numbers_in(expected))


EVERY_MODE = pytest.mark.parametrize("mode", ["async 1", "async 2", "bounded 2", "sync 1", "sync 3", "remote"])
TWO_MODES = pytest.mark.parametrize("mode", ["async 2", "remote"])


@EVERY_MODE
@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
def test_a_checkpoint_is_written_every_so_many_updates(tmp_path, monkeypatch, mode, every):
    monkeypatch.setattr(checkpoint, "save", lambda *what: written.append(what[-1]))
    written = []
    job = Players(monkeypatch, *flags_of(mode, tmp_path / "c.pt", "--checkpoint_every", every, "--epochs", 1)).play()
    updates = BATCHES // 2 if mode.startswith("sync") else BATCHES
    assert job.coordinator.updates == updates
    assert [state["progress"]["updates"] for state in written] == [*range(every, updates + 1, every), updates]
    for state in written[:-1]:
        assert len(state["progress"]["left"]) == BATCHES - state["progress"]["updates"] * BATCHES // updates


@pytest.mark.parametrize("mode", ["async 2", "sync 1", "sync 3", "remote"])
@pytest.mark.parametrize("at", range(1, 6))
def test_a_job_that_goes_on_from_a_checkpoint_ends_as_one_without_an_interruption(tmp_path, monkeypatch, mode, at):
    """To the bit: progress, weights and momentum."""
    whole, broken = tmp_path / "whole.pt", tmp_path / "broken.pt"
    every = ("--checkpoint_every", 2)
    Players(monkeypatch, *flags_of(mode, whole, *every)).play()
    save, count = checkpoint.save, itertools.count(1)

    def save_and_stop(*what):
        save(*what)
        if next(count) == at:
            raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(checkpoint, "save", save_and_stop)
        Players(monkeypatch, *flags_of(mode, broken, *every)).play()
    Players(monkeypatch, *flags_of(mode, broken, *every, "--resume")).play()
    assert_same_state(broken, whole)


@pytest.mark.parametrize("one_is_lost", [False, True], ids=["", "one trainer is lost"])
@pytest.mark.parametrize("mode", ["async 2", "bounded 2", "sync 2", "remote"])
def test_a_job_that_ended_in_an_evaluation_goes_on_with_it(tmp_path, monkeypatch, capsys, mode, one_is_lost):
    """The evaluation is repeated, the epoch counts once, and the end is that of a job without an interruption."""
    whole, broken = tmp_path / "whole.pt", tmp_path / "broken.pt"
    servers = 1 if mode == "remote" else 2
    more = ("--on_lost", "continue") if one_is_lost else ()
    lose = servers if one_is_lost else None
    uninterrupted = Players(monkeypatch, *flags_of(mode, whole, *more)).play(lose)
    of_epoch_1, of_epoch_2 = re.findall("^Epoch .*", capsys.readouterr().out, re.M)

    updates = int(re.search(r"(\d+) updates", of_epoch_1)[1])  # of the first epoch: the last one is in a checkpoint
    flags = flags_of(mode, broken, "--checkpoint_every", updates, *more)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(coordinator, "get_accuracy", interrupt)
        Players(monkeypatch, *flags).play(lose)
    assert saved(broken)["progress"]["left"] == []

    resumed = Players(monkeypatch, *flags, "--resume", "--world_size", servers + 2 - one_is_lost).play()
    printed = capsys.readouterr().out
    assert f"Going on from update {updates}, epoch 1" in printed
    lines = [re.sub(r" [\d,]+ images/s,", "", line) for line in (of_epoch_1, of_epoch_2, printed)]
    assert re.findall("^Epoch .*", lines[2], re.M) == lines[:2]
    assert resumed.progress.images_applied == [4 * BATCHES] * 2 == uninterrupted.progress.images_applied
    assert_same_state(broken, whole)


def interrupt(*_):
    raise Interrupted


@pytest.mark.parametrize("servers, trainers", [(1, 2), (3, 1), (2, 3)])
def test_a_checkpoint_goes_on_with_another_number_of_servers_and_trainers(tmp_path, monkeypatch, servers, trainers):
    flags = flags_of("sync 2", tmp_path / "c.pt", "--checkpoint_every", 1)
    before = Players(monkeypatch, *flags)
    for trainer, batches in before.next_batches().items():
        before.make_update(trainer, batches[0])
    weights, momentum = before.weights(), torch.cat([server.sgd.velocity for server in before.servers])
    before.assign()  # writes the checkpoint
    more = ("--resume", "--num_servers", servers, "--world_size", servers + trainers)
    resumed = Players(monkeypatch, *flags, *more)
    assert torch.equal(resumed.weights(), weights)
    assert torch.equal(torch.cat([server.sgd.velocity for server in resumed.servers]), momentum)
    for server in resumed.servers:
        assert server.sgd.weights.untyped_storage().nbytes() == 4 * len(server.sgd.weights)  # not a view of all weights
    resumed.play()
    assert resumed.progress.images_applied == [4 * BATCHES] * 2


@TWO_MODES
def test_a_finished_job_is_resumed_and_has_a_result(tmp_path, monkeypatch, mode):
    flags = flags_of(mode, tmp_path / "end.pt")
    finished = Players(monkeypatch, *flags).play()
    before = (tmp_path / "end.pt").read_bytes()
    resumed = Players(monkeypatch, *flags, "--resume", "--summary_json", tmp_path / "s.json").play()
    summary = resumed.progress.finish(resumed.coordinator.updates, lost={})
    assert summary["updates"] == 2 * BATCHES and summary["images_applied"] == [4 * BATCHES] * 2
    assert summary["test_accuracy"] == finished.progress.accuracy and summary["images_per_second"] is None
    assert (tmp_path / "end.pt").read_bytes() == before


def test_a_result_tells_of_all_epochs_and_all_trainers(tmp_path, monkeypatch):
    clock = itertools.count(1)  # each call of the clock is a second later
    progress = coordinator.Progress.after_step.__globals__
    monkeypatch.setitem(progress, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    job = Players(monkeypatch, *flags_of("remote", tmp_path / "c.pt")).play()
    job.coordinator.record_loss(1, 0, 2.5)
    summary = job.progress.finish(job.coordinator.updates, lost={})
    assert summary["images_per_second"] == 2 * 4 * BATCHES / 2  # the time between two epochs does not count
    curves = job.progress.report.curves
    assert curves["test accuracy"][0] == [BATCHES, 2 * BATCHES] and curves["loss"] == ([2 * BATCHES], [2.5])


@TWO_MODES
def test_a_checkpoint_that_cannot_be_written_is_told(tmp_path, monkeypatch, mode):
    folder = tmp_path / "a folder"
    folder.mkdir()
    job = Players(monkeypatch, *flags_of(mode, folder / "c.pt", "--checkpoint_every", 2))
    folder.rmdir()
    with pytest.raises(ValueError, match=r"cannot write .*a folder"):
        job.play()


@TWO_MODES
def test_a_file_with_other_weights_is_refused(tmp_path, monkeypatch, mode):
    flags = flags_of(mode, tmp_path / "c.pt")
    Players(monkeypatch, *flags).play()
    settings, state = checkpoint.load(tmp_path / "c.pt", "param_server")
    state["model"]["fc2.bias"] = torch.zeros(11)
    checkpoint.save(tmp_path / "c.pt", "param_server", settings, state)
    with pytest.raises(ValueError, match="cannot go on from"):
        Players(monkeypatch, *flags, "--resume")
