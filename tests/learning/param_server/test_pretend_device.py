"""param_server with its networks on the pretend device: two modes, checkpoint, resume, two mistakes, and the programs
in one file.
"""

import argparse
import io
import pickle
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

import pretend_device
from helpers import ROOT, load_module, load_oracle, run_on_pretend_device
from jobs import free_port
from programs import run_script

oracle = load_oracle("param_server")
full_precision = oracle.full_precision  # a fixture
net, replica = oracle.net, oracle.replica
pytestmark = pytest.mark.skipif(pretend_device.MISSING is not None, reason=str(pretend_device.MISSING))
DONE, STEPS = 5, 10
SYNTHETIC = argparse.Namespace(dataset="synthetic", seed=1)


@pytest.mark.parametrize("mode", [pytest.param("remote", marks=pytest.mark.slow), "replica"])
def test_a_run_that_goes_on_from_a_checkpoint_equals_one_process_on_the_cpu(tmp_path, mode):
    """Losses and weights equal those of the CPU to 1e-6. The checkpoint is from the plain loop."""
    settings = {"mode": mode, "dataset": "synthetic", "seed": 1, "batch_size": 8, "max_batches": STEPS}
    settings["num_servers"] = 1
    progress = {"epoch": 0, "updates": DONE, "stale": Counter({0: DONE}), "accuracy": None, "batch": DONE}
    progress |= {"images_applied": Counter({0: DONE * 8})}
    _, weights = oracle.one_process(DONE, batch_size=8)
    optimized = list(weights.values()) if mode == "remote" else [oracle.joined(weights.values())]
    optimizer = torch.optim.SGD(optimized, lr=0.03).state_dict()
    state = {"progress": progress, "model": weights, "optimizer": optimizer}
    torch.save({"scenario": "param_server", "settings": settings, "state": state}, tmp_path / "end.pt")
    flags = ("--world_size", 2, "--mode", mode, "--resume")
    losses, found = oracle.distributed(tmp_path, STEPS, *flags, run=run_on_pretend_device)
    expected_losses, expected = oracle.one_process(STEPS, batch_size=8)
    assert losses[1] == pytest.approx(expected_losses[DONE:], abs=1e-6)
    oracle.assert_same_weights(found, expected)


def saved(state):
    """Return what a checkpoint file has of this state."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


FLAGS = ("--no_dropout", "--momentum", 0.8, "--lr", 0.01)


def remote_state(device, monkeypatch):
    """Make two updates of a server with momentum, a new server from its state, and another update.

    The convolutions are on `device`. If it is the pretend device, the linear layers are on the second one.
    """
    rest = pretend_device.SECOND if device == pretend_device.DEVICE else device
    monkeypatch.setattr(net, "DEVICES", [(device, rest)])

    def update(server, step):
        data, target = oracle.batch(step)
        output = server.forward(1, data)
        assert str(output.device) == "cpu"
        F.nll_loss(output, target).backward()
        server.apply_gradients(1)

    with pretend_device.one_thread():
        return state_after("remote", "cpu", update, {device, rest})


def replica_state(device, monkeypatch):
    """The same in mode `replica`, with made-up gradients."""

    def update(server, step):
        gradient_P = torch.randn(server.weights_P.shape, generator=torch.Generator().manual_seed(step))
        pickle.dumps(server.push(replica.Push(1, step, 4, gradient_P)))

    return state_after("replica", device, update, {device})


def state_after(mode, made_on, update, devices):
    state = None
    for steps in (2, 1):
        server = oracle.make_server(mode, *FLAGS, device=made_on)
        if state:
            server.load_state_dict(state)
        for step in range(steps):
            update(server, step)
        assert {str(param.device) for param in server.model.parameters()} == devices
        state = saved(server.state_dict())
    momentums = [each["momentum_buffer"] for each in state["optimizer"]["state"].values()]
    return [*state["model"].values(), *momentums]


@pytest.mark.parametrize("state_of", [remote_state, replica_state])
def test_a_server_and_its_momentum_go_on_as_on_the_cpu(state_of, monkeypatch):
    found, expected = (state_of(device, monkeypatch) for device in (pretend_device.DEVICE, "cpu"))
    assert len(found) == len(expected) > 8
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_weights_that_are_sent_from_the_device_are_caught(monkeypatch):
    monkeypatch.setattr(replica.ParameterServer, "pull", lambda server: (0, server.weights_P))
    with pytest.raises(TypeError, match="it must travel by way of the CPU"):
        replica_state(pretend_device.DEVICE, monkeypatch)


def test_images_that_stay_where_they_arrived_are_caught(monkeypatch):
    model, images = net.Net().to(pretend_device.DEVICE), oracle.batch(1)[0]
    with pytest.raises(RuntimeError, match=r"were mixed|same device"):
        model(images)


def test_layers_on_two_devices_without_a_move_between_them_are_caught(monkeypatch):
    monkeypatch.setattr(net, "DEVICES", [(pretend_device.DEVICE, pretend_device.SECOND)])
    model = net.Net()  # it moves the input of fc1, but not the one of fc2
    model.fc2 = torch.nn.Linear(128, 10).to(pretend_device.DEVICE)
    with pytest.raises(RuntimeError, match=r"tensors of pretend:. and pretend:. were mixed|same device"):
        model(oracle.batch(1)[0].to(pretend_device.DEVICE))


def losses_of(program, rest, *flags):
    done = run_script("tests/learning/param_server/pretend_tutorial_job.py", program, 6, *flags, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Putting first 2 convs on pretend:0" in done.stdout and f"Putting rest of layers on {rest}" in done.stdout
    assert len(re.findall(r"^Accuracy ", done.stdout, re.MULTILINE)) == 1
    return [
        float(loss) for loss in re.findall(r"training batch \d+ loss (\S+)", done.stdout, re.IGNORECASE)
    ], done.stdout


@pytest.mark.slow
def test_the_tutorial_and_the_same_without_rpc_train_on_a_device_as_on_the_cpu():
    """tutorial.py has one device; single.py has two, because its backward pass is in the program's own thread."""
    place = ("--world_size", 2, "--master_port", free_port())
    distributed, output = losses_of("tutorial", pretend_device.DEVICE, *place)
    assert "weights on pretend:0" in output
    single, _ = losses_of("single", pretend_device.SECOND)
    tutorial = load_module(ROOT / "param_server" / "tutorial.py")
    digits = torch.utils.data.Subset(tutorial.load_digits(SYNTHETIC, train=True), range(6 * 32))
    order = torch.Generator().manual_seed(2)
    loader = torch.utils.data.DataLoader(digits, batch_size=32, shuffle=True, generator=order)
    torch.manual_seed(1)
    net, expected = tutorial.Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03)
    for images, labels in loader:
        loss = F.nll_loss(net(images), labels)
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert distributed == pytest.approx([expected[0], expected[5]], abs=1e-4)
    assert single == pytest.approx([expected[0], expected[5]], abs=1e-4)


@pytest.mark.slow
def test_trainers_that_wait_for_each_other_train_on_a_device_as_on_the_cpu():
    flags = ("--world_size", 3, "--master_port")
    device = run_script("tests/learning/param_server/pretend_tutorial_job.py", "tutorial_batch", 8, *flags, free_port())
    cpu = run_script("param_server/tutorial_batch.py", "--num_batches", 8, *flags, free_port())
    assert (device.returncode, cpu.returncode) == (0, 0), device.stderr + cpu.stderr
    found, expected = (float(re.search(r"^Loss (\S+)", done.stdout, re.MULTILINE)[1]) for done in (device, cpu))
    assert found == pytest.approx(expected, abs=1e-4)
