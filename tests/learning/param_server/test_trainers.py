"""The training loop of mode `replica`, with its servers in this process: weights of each gradient, and counts."""

import re
import threading

import pytest
import torch
import torch.nn.functional as F

from helpers import ROOT, load_module, package_on_path

with package_on_path("param_server"):
    from data import Batches
    from glue.report import staleness_figures

test_checkpoints = load_module(ROOT / "tests" / "learning" / "param_server" / "test_checkpoints.py")
test_server, SmallNet = test_checkpoints.test_server, test_checkpoints.SmallNet
coordinator, replica = test_server.coordinator, test_server.replica
BATCHES, LR = 10, 0.5  # per epoch; a rate so high that gradients of different weights differ clearly


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A small network, few images, and no RPC."""
    images = torch.randint(0, 256, (4 * BATCHES, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(coordinator, "load_digits", lambda *_, **__: (images[:20], torch.arange(20) % 10))
    monkeypatch.setattr(replica, "Net", SmallNet)
    return Batches(images, torch.arange(len(images)) % 10, batch_size=4, seed=1)


class Slow(test_server.FakeRRef):
    """Replaces an RRef: a push arrives only when its sender waits for the answer."""

    def rpc_async(self, timeout=None):
        return SlowCalls(self.target, wait=False)


class SlowCalls(test_server.Calls):
    def push(self, *what):
        return SlowPush(self.target, what)


class SlowPush:
    def __init__(self, server, what):
        self.server, self.what = server, what

    def wait(self):
        return self.server.push(*self.what).wait()


def train(monkeypatch, batches, *flags, reference=test_server.FakeRRef):
    """Run a job in this process, each trainer on a thread of its own; return (the Job, all weights)."""
    job = test_server.Job("--mode", "replica", "--lr", LR, *flags, patch=monkeypatch)
    monkeypatch.setattr(replica, "server_rref", [reference(server) for server in job.servers].__getitem__)
    monkeypatch.setattr(replica, "coordinator_rref", lambda: test_server.FakeRRef(job.coordinator))
    monkeypatch.setattr(torch.futures, "wait_all", lambda futures: [future.wait() for future in futures])
    ranks = range(job.args.num_servers, job.args.world_size)
    arguments = (job.args, batches, test_server.CPU)
    threads = [threading.Thread(target=replica.train, args=(rank, *arguments), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return job, torch.cat([server.sgd.weights for server in job.servers])


def one_process(batches, late=0, epochs=1, momentum=0.0, rates=(LR, LR)):
    """Train in a plain loop, with gradients of the weights `late` updates ago; return (losses, weights)."""
    torch.manual_seed(1)
    net = SmallNet()
    past = [torch.nn.utils.parameters_to_vector(net.parameters()).detach()]
    losses, velocity = [], 0.0
    for epoch in range(epochs):
        start = len(past) - 1  # an epoch begins with the current weights
        for _, data, target in batches.of(epoch, range(batches.per_epoch)):
            torch.nn.utils.vector_to_parameters(past[max(start, len(past) - 1 - late)], net.parameters())
            loss = F.nll_loss(net(data), target)
            gradient = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, list(net.parameters()))])
            velocity = gradient + momentum * velocity
            past.append(past[-1] - rates[epoch] * velocity)
            losses.append(loss.item())
    return losses, past[-1]


@pytest.mark.parametrize(
    "flags, expected, stale",
    [
        ((), {}, {0: 20}),
        (("--momentum", 0.5, "--num_servers", 2), {"momentum": 0.5}, {0: 20}),
        (("--lr_step", 1), {"rates": (LR, LR / 10)}, {0: 20}),
        (("--sync_every", 3), {}, {0: 8}),  # pushes of 3, 3, 3 and 1 batches
        (("--overlap",), {"late": 1}, {0: 2, 1: 18}),  # the first gradient of an epoch is not late
        (("--overlap", "--num_servers", 2), {"late": 1}, {0: 2, 1: 18}),
        (("--consistency", "sync", "--num_servers", 3), {}, {0: 20}),
        (("--evaluations", 3), {}, {0: 20}),
        (("--evaluations", 3, "--num_servers", 2), {}, {0: 20}),
    ],
)
def test_one_trainer_computes_what_one_process_does(monkeypatch, small, capsys, flags, expected, stale):
    servers = flags[flags.index("--num_servers") + 1] if "--num_servers" in flags else 1
    more = ("--world_size", servers + 1, "--epochs", 2, "--log_interval", 1)
    job, weights = train(monkeypatch, small, *flags, *more)
    losses, expected_weights = one_process(small, epochs=2, **expected)
    printed = re.findall(rf"^Rank {servers} training batch \d+ loss (\S+)$", capsys.readouterr().out, re.M)
    assert [float(loss) for loss in printed] == pytest.approx(losses, abs=1e-4)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-4)
    assert job.progress.stale == stale and job.progress.images_applied == [4 * BATCHES] * 2


def test_the_accuracy_is_measured_as_often_as_is_asked_for(monkeypatch, small, capsys):
    flags = ("--world_size", 3, "--epochs", 2, "--evaluations", 4)  # after 3, 6, 9 and all 10 batches
    job, _ = train(monkeypatch, small, *flags)
    updates, accuracies = job.progress.report.curves["test accuracy"]
    assert updates == [3, 6, 9, 10, 13, 16, 19, 20] and all(0 <= accuracy <= 1 for accuracy in accuracies)
    printed = re.findall(r"^Epoch (\d), update (\d+): Accuracy \d\.\d{4}$", capsys.readouterr().out, re.M)
    assert printed == [("1", "3"), ("1", "6"), ("1", "9"), ("2", "13"), ("2", "16"), ("2", "19")]


def test_overlap_tells_a_staleness_of_one_but_for_the_first_gradient(monkeypatch, small):
    job, _ = train(monkeypatch, small, "--overlap", "--world_size", 2)
    assert staleness_figures(job.progress.stale) == {"staleness_mean": 0.9, "staleness_max": 1}
    _, of_the_newest = one_process(small)
    _, of_the_last = one_process(small, late=1)
    assert (of_the_newest - of_the_last).abs().max() > 1e-2  # the two differ clearly


def test_overlap_waits_for_its_last_push_before_it_asks_for_more(monkeypatch, small, capsys):
    job, weights = train(monkeypatch, small, "--overlap", "--world_size", 2, "--log_interval", 1, reference=Slow)
    assert capsys.readouterr().out.count("training batch") == BATCHES  # no batch was assigned a second time
    _, expected = one_process(small, late=1)
    assert job.progress.images_applied == [4 * BATCHES] and job.coordinator.updates == BATCHES
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("servers", [1, 2])
def test_sync_trainers_compute_what_one_process_does_on_their_joined_batch(monkeypatch, small, servers):
    flags = ("--consistency", "sync", "--num_servers", servers, "--world_size", servers + 2)
    job, weights = train(monkeypatch, small, *flags)
    joined = Batches(small.images, small.labels, batch_size=8, seed=1)
    _, expected = one_process(joined)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-4)
    assert job.coordinator.updates == BATCHES // 2 and job.progress.stale == {0: BATCHES}
