"""param_server's checkpoints: written at any moment and resumed in this process, with any number of servers."""

import itertools
import re
import threading
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import ROOT, load_module

test_server = load_module(ROOT / "tests" / "param_server" / "test_server.py")
few_test_images = test_server.few_test_images  # a fixture
checkpoint, scoreboard = test_server.checkpoint, test_server.scoreboard
remote_server, replica_server = test_server.remote_server, test_server.replica_server
several_servers = test_server.several_servers
BATCHES = 12  # in an epoch


class SmallNet(nn.Module):
    """A small network.  The code of checkpoints does not depend on the size of the network."""

    def __init__(self, num_gpus=0):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 16), nn.Linear(16, 10)

    def forward(self, x, dropout_key=None):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x.flatten(1)))), dim=1)


@pytest.fixture(autouse=True)
def small_network(monkeypatch):
    monkeypatch.setattr(remote_server, "Net", SmallNet)
    monkeypatch.setattr(replica_server, "Net", SmallNet)
    monkeypatch.setattr(several_servers, "Net", SmallNet)


class Interrupted(Exception):
    """Simulates a SIGKILL."""


class Players:
    """A job in this process, whose trainers take turns.  Each batch has a gradient of its own."""

    def __init__(self, monkeypatch, servers, *flags):
        if "remote" in flags:
            self.servers = [remote_server.ParameterServer(test_server.arguments(*flags))]
            self.servers[0].scoreboard.resume()
        else:
            self.servers = test_server.servers_in_this_process(monkeypatch, servers, *flags)
        self.scoreboard = self.servers[0].scoreboard
        self.remote = "remote" in flags
        self.pushed, self.version = {}, {}  # trainer -> Future of its last push; version of its weights

    def push(self, trainer, batch):
        if self.remote:
            server = self.servers[0]
            server.forward(trainer, torch.zeros(4, 1, 28, 28))
            for param in server.model.parameters():
                param.grad = torch.full_like(param, 0.01 * batch)
            return server.apply_gradients(trainer)
        if trainer in self.pushed:
            self.take(trainer, self.pushed.pop(trainer).value())
        self.pushed[trainer] = test_server.push_parts(self.servers, trainer, self.version[trainer], 0.01 * batch)

    def take(self, trainer, answer):
        """Do what a trainer does with the answer to a push or a pull."""
        self.version[trainer], _, *log = answer
        for other in self.servers[1:]:
            other.catch_up(*log[0])

    def play(self, lose=None):
        """Let the trainers work until the job ends.  If one of them is to be lost, it is lost after its first batch."""
        while batches := self.next_batches():
            for turn in range(max(map(len, batches.values()))):
                working = [trainer for trainer in batches if trainer in self.scoreboard.living]
                for trainer in working:
                    if turn < len(batches[trainer]):
                        self.push(trainer, batches[trainer][turn])
                if lose in self.scoreboard.living and turn == 0:
                    self.scoreboard.drop(lose)
        return self

    def next_batches(self):
        """Return {trainer: the numbers of the batches in its assignment}."""
        for trainer in list(self.pushed):
            self.take(trainer, self.pushed.pop(trainer).value())
        trainers = sorted(self.scoreboard.living)
        answers = {}
        for trainer in trainers:
            answers[trainer] = self.scoreboard.next_assignment(trainer, BATCHES)
        assignments = {trainer: answer.wait() for trainer, answer in answers.items()}
        batches = {trainer: assignment.batches for trainer, assignment in assignments.items() if assignment}
        for trainer in [] if self.remote else batches:
            self.take(trainer, self.servers[0].pull())
        return batches


def flags_of(mode, path, *more):
    consistency = () if mode == "remote" else ("--consistency", mode)
    flags = ("--mode", "remote" if mode == "remote" else "replica", *consistency)
    return (*flags, "--epochs", 2, "--momentum", 0.5, "--checkpoint", path, *more)


def assert_same_state(path, expected_path):
    """Assert that progress, weights and momentum are equal to the bit."""
    (_, found), (_, expected) = (checkpoint.load(file, "param_server") for file in (path, expected_path))
    assert found["progress"] == expected["progress"]
    for name, weights in expected["model"].items():
        assert torch.equal(found["model"][name], weights), name
    assert len(found["momentum"]) == len(expected["momentum"]) > 0
    for one, other in zip(found["momentum"], expected["momentum"], strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------- a checkpoint of the last update of an epoch


@pytest.mark.parametrize("one_is_lost", [False, True], ids=["", "one trainer is lost"])
@pytest.mark.parametrize("mode, servers", [("async", 2), ("bounded", 2), ("sync", 2), ("remote", 1)])
def test_a_job_that_ended_in_an_evaluation_goes_on_with_it(tmp_path, monkeypatch, capsys, mode, servers, one_is_lost):
    """The evaluation is repeated, the epoch counts once, and the end is that of a job without an interruption."""
    whole, broken = tmp_path / "whole.pt", tmp_path / "broken.pt"
    more = ("--world_size", servers + 2, *(("--on_lost", "continue") if one_is_lost else ()))
    lose = servers if one_is_lost else None
    uninterrupted = Players(monkeypatch, servers, *flags_of(mode, whole, *more)).play(lose)
    of_epoch_1, of_epoch_2 = re.findall("^Epoch .*", capsys.readouterr().out, re.M)

    updates = int(re.search(r"(\d+) updates", of_epoch_1)[1])  # of the first epoch: the last one is in a checkpoint
    flags = flags_of(mode, broken, "--checkpoint_every", updates)
    interrupted = Players(monkeypatch, servers, *flags, *more)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(scoreboard, "get_accuracy", interrupt)
        interrupted.play(lose)
    assert test_server.wait_for_checkpoint(interrupted.servers[0])["progress"]["left"] == []

    resumed = Players(monkeypatch, servers, *flags, "--resume", "--world_size", servers + 2 - one_is_lost).play()
    printed = capsys.readouterr().out
    assert f"Going on from update {updates}, epoch 1" in printed
    lines = [re.sub(r" [\d,]+ images/s,", "", line) for line in (of_epoch_1, of_epoch_2, printed)]
    assert re.findall("^Epoch .*", lines[2], re.M) == lines[:2]
    assert resumed.scoreboard.images_applied == [4 * BATCHES] * 2 == uninterrupted.scoreboard.images_applied
    assert_same_state(broken, whole)


@pytest.mark.parametrize("mode", ["async", "remote"])
def test_a_checkpoint_of_an_older_version_goes_on(tmp_path, monkeypatch, mode):
    """In older versions `progress` was named `books`."""
    flags = flags_of(mode, tmp_path / "c.pt", "--world_size", 3)
    Players(monkeypatch, 1, *flags).play()
    settings, state = checkpoint.load(tmp_path / "c.pt", "param_server")
    state["books"] = state.pop("progress")
    checkpoint.save(tmp_path / "c.pt", "param_server", settings, state)
    resumed = Players(monkeypatch, 1, *flags, "--resume", "--epochs", 3).play()
    assert resumed.scoreboard.updates == 3 * BATCHES and resumed.scoreboard.images_applied == [4 * BATCHES] * 3


def interrupt(*_):
    raise Interrupted


@pytest.mark.parametrize("mode, servers", [("async", 2), ("remote", 1)])
def test_a_finished_job_is_resumed_and_has_a_result(tmp_path, monkeypatch, mode, servers):
    flags = flags_of(mode, tmp_path / "end.pt", "--world_size", servers + 2)
    finished = Players(monkeypatch, servers, *flags).play()
    before = (tmp_path / "end.pt").read_bytes()
    resumed = Players(monkeypatch, servers, *flags, "--resume", "--summary_json", tmp_path / "s.json").play()
    summary = scoreboard.write_result(resumed.scoreboard, lost=[])
    assert summary["updates"] == 2 * BATCHES and summary["images_applied"] == [4 * BATCHES] * 2
    assert summary["test_accuracy"] == finished.scoreboard.accuracy and summary["images_per_second"] is None
    assert (tmp_path / "end.pt").read_bytes() == before


def test_a_result_tells_of_all_epochs_and_all_trainers(tmp_path, monkeypatch):
    clock = itertools.count(1)  # each call of the clock is a second later
    monkeypatch.setattr(scoreboard, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    job = Players(monkeypatch, 1, *flags_of("remote", tmp_path / "c.pt", "--world_size", 3)).play()
    job.scoreboard.record_loss(1, 0, 2.5)
    summary = scoreboard.write_result(job.scoreboard, lost=[])
    assert summary["images_per_second"] == 2 * 4 * BATCHES / 2  # the time between two epochs does not count
    curves = job.scoreboard.report.curves
    assert curves["test accuracy"][0] == [BATCHES, 2 * BATCHES] and curves["loss"] == ([2 * BATCHES], [2.5])


# ------------------------------------------------------------------- what a resumed job sends to its servers


def test_after_resume_each_server_is_sent_its_own_range_once_and_trainers_carry_none_of_it(tmp_path, monkeypatch):
    flags = flags_of("sync", tmp_path / "c.pt", "--world_size", 5)
    Players(monkeypatch, 3, *flags).play()
    _, state = checkpoint.load(tmp_path / "c.pt", "param_server")
    weights = torch.cat([each.reshape(-1) for each in state["model"].values()])

    resumed = Players(monkeypatch, 3, *flags, "--resume", "--epochs", 3)
    assert resumed.next_batches()
    sent = [several_servers.server_rref(index).sent for index in (1, 2)]
    assert [[name for name, _ in calls] for calls in sent] == [["start_from"]] * 2
    parts = [several_servers.range_of(index, 3, len(weights)) for index in (1, 2)]
    for ((_, (_, weights_R, velocity_R)),), part in zip(sent, parts, strict=True):
        assert torch.equal(weights_R, weights[part]) and torch.equal(velocity_R, state["momentum"][part])
    _, _, (_, log) = resumed.servers[0].pull()
    assert log == []  # which a trainer would send to the other servers
    for server in resumed.servers:
        assert server.sgd.weights.untyped_storage().nbytes() == 4 * len(server.sgd.weights)  # not a view of all weights


# ------------------------------------------------------------------- the thread that writes


class SlowDisk:
    """Replaces checkpoint.save: the first call of a job waits until the test allows it to return."""

    def __init__(self, monkeypatch):
        self.plain, self.saved = checkpoint.save, []
        self.reached, self.may_return, self.overtaken = threading.Event(), threading.Event(), threading.Event()
        monkeypatch.setattr(scoreboard.checkpoint, "save", self.save)

    def save(self, path, scenario, settings, state):
        self.saved.append(state)
        if len(self.saved) == 1:
            self.reached.set()
            assert self.may_return.wait(20)
        elif not self.may_return.is_set():
            self.overtaken.set()
        self.plain(path, scenario, settings, state)


@pytest.mark.parametrize("mode, servers", [("async", 1), ("async", 2), ("remote", 1)])
def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_the_moment_when_it_was_due(
    tmp_path, monkeypatch, mode, servers
):
    flags = flags_of(mode, tmp_path / "c.pt", "--checkpoint_every", 3, "--world_size", servers + 2)
    disk, job = SlowDisk(monkeypatch), Players(monkeypatch, servers, *flags)
    work = [(trainer, batch) for trainer, batches in job.next_batches().items() for batch in batches[:2]]
    for trainer, batch in work[:3]:
        job.push(trainer, batch)
    expected = {name: weights.clone() for name, weights in capture_now(job).items()}
    momentum = [each.clone() for each in momentum_now(job)]
    assert disk.reached.wait(20)
    job.push(*work[3])  # returns: the writer thread holds no lock
    disk.may_return.set()
    state = test_server.wait_for_checkpoint(job.servers[0])
    assert state["progress"]["updates"] == 3 and job.scoreboard.updates == 4
    assert state["progress"]["images_applied"] == [12] and state["progress"]["stale"].total() == 3
    assert all(torch.equal(state["model"][name], weights) for name, weights in expected.items())
    assert all(map(torch.equal, state["momentum"] if job.remote else [state["momentum"]], momentum))
    assert not torch.equal(capture_now(job)["fc2.bias"], expected["fc2.bias"])
    assert not any(map(torch.equal, momentum_now(job), momentum))


def capture_now(job):
    """Return the weights of all servers by name, without a call to them."""
    if job.remote:
        return dict(job.servers[0].model.state_dict())
    for trainer in list(job.pushed):
        job.take(trainer, job.pushed.pop(trainer).value())
    weights_P = torch.cat([server.sgd.weights for server in job.servers])
    net = SmallNet()
    torch.nn.utils.vector_to_parameters(weights_P, net.parameters())
    return dict(net.state_dict())


def momentum_now(job):
    """Return the momentum as a checkpoint has it: of each parameter in mode `remote`, otherwise as one tensor."""
    if job.remote:
        return [state["momentum_buffer"] for state in job.servers[0].optimizer.state.values()]
    return [torch.cat([server.sgd.velocity for server in job.servers])]


@pytest.mark.parametrize("mode, servers", [("async", 2), ("remote", 1)])
def test_the_newest_checkpoint_is_written_last_also_if_the_trainer_before_it_is_lost(
    tmp_path, monkeypatch, mode, servers
):
    """A trainer's last push makes a checkpoint due, which takes long.  The trainer dies.  The epoch ends without it."""
    flags = flags_of(mode, tmp_path / "c.pt", "--checkpoint_every", BATCHES, "--world_size", servers + 2)
    disk, job = SlowDisk(monkeypatch), Players(monkeypatch, servers, *flags, "--on_lost", "continue")
    first, last = servers, servers + 1
    batches = job.next_batches()
    for trainer in (first, last):
        for batch in batches[trainer]:
            job.push(trainer, batch)
    assert disk.reached.wait(20)
    job.scoreboard.drop(last)
    end_of_epoch = threading.Thread(target=job.scoreboard.next_assignment, args=(first, BATCHES))
    end_of_epoch.start()
    assert not disk.overtaken.wait(0.3)
    disk.may_return.set()
    end_of_epoch.join(20)
    assert [state["progress"]["epoch"] for state in disk.saved] == [0, 1]
    assert all(
        torch.equal(disk.saved[0]["model"][name], disk.saved[1]["model"][name]) for name in disk.saved[0]["model"]
    )
    _, state = checkpoint.load(tmp_path / "c.pt", "param_server")
    assert state["progress"]["epoch"] == 1 and state["progress"]["accuracy"] == job.scoreboard.accuracy


def test_two_checkpoints_under_way_each_have_the_weights_of_their_own_moment(tmp_path, monkeypatch):
    """The older one is collected from the servers only after the newer one was captured there."""
    flags = ("--mode", "replica", "--checkpoint", tmp_path / "c.pt", "--checkpoint_every", 1, "--world_size", 4)
    job = Players(monkeypatch, 2, *flags)
    other, before = job.servers[1], capture_now(job)["fc2.bias"].clone()
    writer_may_go_on, saved, collect = threading.Event(), [], other.captured_at
    other.captured_at = lambda *what: writer_may_go_on.wait(20) and collect(*what)
    monkeypatch.setattr(scoreboard.checkpoint, "save", lambda *what: saved.append(what[-1]))
    batches = job.next_batches()
    work = [(trainer, batch) for trainer in (2, 3) for batch in batches[trainer]]
    for trainer, batch in work:
        job.push(trainer, batch)
    end_of_epoch = threading.Thread(target=job.next_batches)
    end_of_epoch.start()
    end_of_epoch.join(0.1)
    assert end_of_epoch.is_alive() and not saved  # both are being written
    writer_may_go_on.set()
    end_of_epoch.join(20)
    assert [state["progress"]["updates"] for state in saved] == [1, BATCHES]
    gradients = [0.01 * batch for _, batch in work]
    for state, applied in zip(saved, (gradients[:1], gradients), strict=True):
        torch.testing.assert_close(state["model"]["fc2.bias"], before - 0.03 * sum(applied))
    assert not other.captured


def test_a_push_that_comes_while_a_checkpoint_is_gathered_is_still_told_to_the_other_servers(tmp_path, monkeypatch):
    flags = ("--mode", "replica", "--checkpoint", tmp_path / "c.pt", "--checkpoint_every", 1, "--world_size", 4)
    job = Players(monkeypatch, 2, *flags)
    first, second = job.servers
    job.next_batches()
    before = first.sgd.weights[0].item(), second.sgd.weights[0].item()
    plain = second.captured_at

    def captured_at(*which):
        job.push(3, 100)  # its trainer dies before it can send the log on
        return plain(*which)

    second.captured_at = captured_at
    job.push(2, 200)

    def steps():
        """Return how far each server's weights have changed, in units of trainer 3's update."""
        return [
            (start - server.sgd.weights[0].item()) / 0.03 for start, server in zip(before, job.servers, strict=True)
        ]

    job.scoreboard.last_save.result()
    assert steps() == pytest.approx([3, 2], abs=1e-4)
    job.take(2, first.pull())
    assert steps() == pytest.approx([3, 3], abs=1e-4)


@pytest.mark.parametrize("mode", ["async", "remote"])
def test_a_checkpoint_that_cannot_be_written_is_told_at_the_next_update(tmp_path, monkeypatch, mode):
    folder = tmp_path / "a folder"
    folder.mkdir()
    job = Players(monkeypatch, 1, *flags_of(mode, folder / "c.pt", "--checkpoint_every", 2, "--world_size", 3))
    folder.rmdir()
    batches = job.next_batches()
    job.push(1, 0)
    job.push(2, 1)
    assert "No such file or directory" in str(job.scoreboard.last_save.exception())
    with pytest.raises(ValueError, match=r"cannot write .*a folder"):
        job.push(1, batches[1][1])
