"""tutorial.py and single.py: any number of trainers, each gradient is right, and what the published code does."""

import argparse
import copy
import re

import pytest
import torch

from helpers import ROOT, load_module, noise, package_on_path, write_mnist
from local_rpc import RRef
from patches import patched
from tutorials import copied_alone, run_in_terminals, run_spawned

tutorial = load_module(ROOT / "param_server" / "tutorial.py")
single = load_module(ROOT / "param_server" / "single.py")
quick = pytest.mark.quick


# ------------------------------------------------------------------------- the server, called in this process


@quick
@pytest.mark.parametrize("program, network", [(tutorial, "TrainerNet"), (single, "Net")])
def test_accuracy_is_measured_without_dropout(program, network, capsys, monkeypatch):
    """eval() of a trainer's network reaches the layers on the server, and only for the calls of this trainer.

    Here the server is in the trainer's process.
    """
    monkeypatch.setattr(tutorial.rpc, "remote", lambda name, function, args: RRef(function(*args)))
    monkeypatch.setattr(tutorial, "param_server", None)
    torch.manual_seed(1)
    net = getattr(program, network)()
    model = net.param_server_rref.local_value().model if program is tutorial else net
    images = torch.randn(200, 1, 28, 28)
    labels = copy.deepcopy(model).eval()(images).argmax(dim=1)
    assert (net(images).argmax(dim=1) == labels).float().mean() < 0.95  # measured as in the published code
    program.get_accuracy(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 32), net)
    assert capsys.readouterr().out.endswith("Accuracy 1.0\n")
    assert not net.training and model.training == (program is tutorial)


@quick
@pytest.mark.parametrize(
    "gpus, wanted, found", [(0, 2, "cpu"), (2, 0, "cpu"), (1, 2, "cuda:0"), (2, 1, "cuda:0"), (2, 2, "cuda:1")]
)
def test_the_second_device_is_the_last_gpu_that_is_there(gpus, wanted, found, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for program in (tutorial, single):
        assert str(program.get_device(1, wanted)) == found


# ------------------------------------------------------------------------- data and flags


@quick
def test_mnist_is_read_from_where_main_reads_it_too(tmp_path):
    write_mnist(tmp_path, noise(6), noise(7))
    with package_on_path("param_server"):
        import data

        mains_images, mains_labels = data.load_digits("mnist", str(tmp_path), 1, train=True)
    args = argparse.Namespace(dataset="mnist", data_dir=str(tmp_path))
    for program in (tutorial, single):
        found = list(program.load_digits(args, train=True))
        torch.testing.assert_close(torch.stack([image for image, _ in found]), data.normalised(mains_images))
        assert [label for _, label in found] == mains_labels.tolist()


# ------------------------------------------------------------------------- all ranks, over real RPC


def notes_each_gradient(program, noting):
    """The training set is cut, and a trainer measures no accuracy. At its end the server checks what was noted."""
    functional_call, sgd_step = program.functional_call, program.optim.SGD.step
    load_digits, run_parameter_server = program.load_digits, program.run_parameter_server

    def load_few(args, train):
        return program.TensorDataset(*(tensor[: 18 * 32] for tensor in load_digits(args, train).tensors))

    def forward(layers, weights, arguments):
        noting.note_forward(weights, *arguments)
        return functional_call(layers.eval(), weights, arguments)

    def run_and_check(*arguments):
        run_parameter_server(*arguments)
        noting.check(
            program.Net().eval(), load_few(program.argparse.Namespace(dataset="synthetic", seed=1), train=True)
        )

    program.load_digits, program.get_accuracy = load_few, lambda *_: None
    program.functional_call, program.run_parameter_server = forward, run_and_check
    program.optim.SGD.step = lambda self: noting.note_step(self, lambda: sgd_step(self))


def test_every_gradient_of_the_tutorials_concurrent_trainers_is_right(tmp_path):
    """Three trainers with six batches each. Together these are one pass over the images (difference 3)."""
    here = ROOT / "tests" / "learning" / "param_server"
    program = patched(copied_alone("param_server/tutorial.py", tmp_path), notes_each_gradient)
    done = run_spawned(program, "--dataset", "synthetic", env={"PYTHONPATH": here}, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    line = re.search(r"checked (\d+) gradients of (\d+) images, (\d+) late, worst difference (\S+)", done.stdout)
    assert (int(line[1]), int(line[2])) == (18, 18 * 32)
    assert int(line[3]) > 3  # training steps must have overlapped for this test to show anything
    assert float(line[4]) < 1e-6


def losses(output, start):
    return [(int(i), float(loss)) for i, loss in re.findall(rf"{start} batch (\d+) loss ([\d.]+)", output)]


def accuracies(output):
    return [float(figure) for figure in re.findall(r"^Accuracy ([\d.]+)$", output, re.MULTILINE)]


@quick
def test_one_trainer_in_terminals_and_one_process_have_the_losses_of_a_plain_loop(tmp_path, run_here):
    program = copied_alone("param_server/tutorial.py", tmp_path)
    server, trainer = run_in_terminals(program, 2, "--dataset", "synthetic")
    assert [(done.returncode, done.stderr) for done in (server, trainer)] == [(0, "")] * 2
    assert "Using 0 GPUs to train" in server.stdout and server.stdout.endswith("RPC shutdown on parameter server.\n")
    single = run_here(copied_alone("param_server/single.py", tmp_path), "--dataset", "synthetic")
    found, expected = losses(trainer.stdout, "Rank 1 training")[:9], losses(single, "Training")[:9]
    assert [i for i, _ in found] == [i for i, _ in expected] == list(range(0, 45, 5))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=1e-3)
    assert accuracies(trainer.stdout)[0] > 0.95 and accuracies(single)[0] > 0.95
