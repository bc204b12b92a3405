"""tutorial_batch.py: every gradient counts once, and answers do not change."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from helpers import ROOT, load_module
from local_rpc import RRef
from tutorials import copied_alone, run_in_terminals, run_spawned

batch_page = load_module(ROOT / "param_server" / "tutorial_batch.py")
Server = batch_page.BatchUpdateParameterServer
quick = pytest.mark.quick


def gradients(server, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) for p in server.model.parameters()]


def push(server, seed):
    return type(server).update_and_fetch_model(RRef(server), gradients(server, seed))


# ------------------------------------------------------------------------- the server, called in this process


@quick
def test_a_later_update_does_not_change_an_answer_that_rpc_may_still_be_sending():
    server = Server(1)
    for answer in (server.get_model(), push(server, seed=1).wait()):
        before = parameters_to_vector(answer.parameters())
        push(server, seed=2).wait()
        assert torch.equal(parameters_to_vector(answer.parameters()), before)
        assert not torch.equal(parameters_to_vector(server.get_model().parameters()), before)


@quick
def test_updates_are_those_of_one_process_on_the_mean_gradient():
    torch.manual_seed(1)
    server = Server(3)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12_288, 64), nn.ReLU(), nn.Linear(64, 30))
    weights = parameters_to_vector(net.parameters())
    momentum = torch.zeros_like(weights)
    for update in range(10):
        seeds = [3 * update + trainer for trainer in range(3)]
        answers = [push(server, seed) for seed in seeds]
        mean = torch.stack([parameters_to_vector(gradients(server, seed)) for seed in seeds]).mean(dim=0)
        momentum = 0.9 * momentum + mean
        weights = weights - 0.1 * momentum
    for answer in answers:
        torch.testing.assert_close(parameters_to_vector(answer.wait().parameters()), weights, rtol=0, atol=1e-5)


@quick
def test_many_threads_push_at_once_and_each_gradient_counts_once():
    torch.manual_seed(1)
    server = Server(8)
    start = parameters_to_vector(server.model.parameters())
    together = threading.Barrier(8)

    def trainer(_):
        for _ in range(5):
            together.wait()
            ones = [torch.ones_like(p) for p in server.model.parameters()]
            Server.update_and_fetch_model(RRef(server), ones).wait()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(trainer, range(8)))
    momentum, moved = 0.0, 0.0
    for _ in range(5):
        momentum = 0.9 * momentum + 1
        moved += 0.1 * momentum
    assert server.updates == 5
    torch.testing.assert_close(parameters_to_vector(server.model.parameters()), start - moved, rtol=0, atol=1e-5)


@quick
def test_a_trainer_waits_for_the_others_and_is_answered_when_the_lock_is_free():
    server, locked = Server(3), []
    answers = [push(server, seed) for seed in (1, 2)]
    for answer in answers:
        assert not answer.done()
        answer.add_done_callback(lambda _: locked.append(server.lock.locked()))
    last = push(server, seed=3)
    assert last.done() and all(answer.done() for answer in answers)
    assert locked == [False, False]
    assert not push(server, seed=4).done()  # the next update has a new Future


@quick
def test_a_trainers_batches_repeat_exactly_and_are_its_own(monkeypatch):
    def batches_of(rank):
        monkeypatch.setattr(batch_page.rpc, "get_worker_info", lambda: SimpleNamespace(id=rank))
        trainer = batch_page.Trainer(None, 1, 2)
        return [images for images, _ in trainer.get_next_batch()]

    assert all(map(torch.equal, batches_of(1), batches_of(1)))
    assert not any(map(torch.equal, batches_of(1), batches_of(2)))


# ------------------------------------------------------------------------- all ranks, over real RPC


def result(output):
    """Return (updates, loss at the end, loss of guessing)."""
    (updates,) = re.findall(r"Finish training: (\d+) updates", output)
    ((loss, guessing),) = re.findall(r"Loss ([\d.]+) \(guessing: ([\d.]+)\)", output)
    return int(updates), float(loss), float(guessing)


def test_two_trainers_learn_alone_in_a_folder(tmp_path):
    program = copied_alone("param_server/tutorial_batch.py", tmp_path)
    done = run_spawned(program, "--world_size", 3, "--num_batches", 60, cwd=tmp_path, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    updates, loss, guessing = result(done.stdout)
    always_the_mean = F.mse_loss(torch.full((30, 30), 1 / 30), torch.eye(30)).item()
    assert guessing == pytest.approx(always_the_mean, abs=1e-5)
    assert updates == 60
    assert loss < 0.8 * guessing
    said = re.findall(r"^\d\d:\d\d:\d\d (.*?)(?:, loss .*)?$", done.stdout, re.MULTILINE)
    for trainer in ("trainer1", "trainer2"):
        three = [f"{trainer} {what}" for what in ("processing one batch", "reporting grads", "got updated model")]
        assert [line for line in said if line.startswith(trainer)] == three * 6
    assert [line for line in said if line.startswith("PS got")] == ["PS got 0/2 updates", "PS got 1/2 updates"] * 6
    assert said.count("PS updated model") == 6


def test_two_trainers_without_batching_in_terminals(tmp_path):
    program = copied_alone("param_server/tutorial_batch.py", tmp_path)
    ranks = run_in_terminals(program, 3, "--num_batches", 20, "--no_batch")
    assert [(done.returncode, done.stderr) for done in ranks] == [(0, "")] * 3
    assert result(ranks[0].stdout)[0] == 40
