"""What the tests of param_server compare with: the same training in one process. And how they run main.py."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from helpers import package_on_path
from programs import ROOT, run_script

with package_on_path("param_server"):
    from glue.training import seed_for

    import main
    import net
    from data import Batches, load_digits

STEPS = 20


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """On a GPU, too."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # cuDNN's convolutions would round to 10 bits


def updates_of_one_process(steps, epochs=1, late=0):
    """Return the updates of a plain loop with so many steps per epoch, in the form of `update_list` of main.py.

    `late`: a gradient comes from the weights before so many updates, but from none before its epoch.
    """
    return [
        {"epoch": epoch, "batches": [batch], "versions": [epoch * steps + max(0, batch - late)]}
        for epoch in range(epochs)
        for batch in range(steps)
    ]


def train(updates, data_dir, batch_size, momentum=0.0, lr=0.03, dtype=torch.float32, seed=1):
    """Make these updates in a loop; return (the loss of each batch, weights by name).

    `data_dir`: of MNIST's files. The learning rate falls to a tenth in each epoch. There is no dropout.
    """
    torch.manual_seed(seed_for(seed, "net"))
    model = net.Net().to(dtype).eval()
    weights_P = parameters_to_vector(model.parameters()).detach()
    versions, losses = [weights_P.clone()], []
    optimizer = torch.optim.SGD([weights_P], lr=lr, momentum=momentum)
    batches = Batches(*load_digits("mnist", str(data_dir), seed, train=True), batch_size, seed)
    for update in updates:
        optimizer.param_groups[0]["lr"] = lr * 0.1 ** update["epoch"]
        gradients, sizes = [], []
        for batch, version in zip(update["batches"], update["versions"], strict=True):
            data, target = batches.get(update["epoch"], batch)
            vector_to_parameters(versions[version], model.parameters())
            loss = F.nll_loss(model(data.to(dtype)), target)
            gradient = torch.autograd.grad(loss, list(model.parameters()))
            gradients.append(torch.cat([each.reshape(-1) for each in gradient]))
            sizes.append(len(target))
            losses.append(loss.item())
        weights_P.grad = sum(
            gradient * (size / sum(sizes)) for gradient, size in zip(gradients, sizes, strict=True)
        )  # the mean over all images
        optimizer.step()
        versions.append(weights_P.clone())
    vector_to_parameters(weights_P, model.parameters())
    return losses, {name: weights.detach() for name, weights in model.state_dict().items()}


def distributed(folder, data_dir, *flags, main="param_server/main.py", run=run_script):
    """Run main.py without dropout; return (its summary, losses by trainer, weights by name)."""
    files = ("--checkpoint", folder / "end.pt", "--summary_json", folder / "summary.json")
    done = run(main, "--data_dir", data_dir, "--no_dropout", "--log_interval", 1, *files, *flags)
    assert (done.returncode, done.stderr) == (0, ""), done
    losses = {}  # in the order in which they were printed, which is that of a trainer's batches
    for trainer, loss in re.findall(r"^Rank (\d+) training batch \d+ loss (\S+)$", done.stdout, re.M):
        losses.setdefault(int(trainer), []).append(float(loss))
    summary = json.loads((folder / "summary.json").read_text())
    return summary, losses, torch.load(folder / "end.pt", weights_only=True)["state"]["model"]


def assert_same_weights(weights, expected, tolerance=1e-6):
    torch.testing.assert_close(weights, expected, rtol=0, atol=tolerance)
