"""What the tests of param_server compare with: the same training in one process. And servers to call directly."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import vector_to_parameters

from helpers import package_on_path
from programs import run_main, run_script

with package_on_path("param_server"):
    import evaluation
    import main
    import net
    import progress
    import ranks
    import replica
    from data import Batches, load_digits
    from glue.seeds import seed_for

STEPS = 20
COMMON = ("--dataset", "synthetic", "--log_interval", "1", "--batch_size", "8")


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """On a GPU, too."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # cuDNN's convolutions would round to 10 bits


def one_process(steps, batch_size, momentum=0.0, lr=0.03, seed=1, dtype=torch.float32, epochs=1, late=0):
    """Train in a plain loop; return (losses, weights by name) after so many training steps per epoch.

    From epoch to epoch the learning rate falls to a tenth. `late`: a gradient comes from the weights before so many
    updates, but from none before its epoch.
    """
    torch.manual_seed(seed_for(seed, "net"))
    model = net.Net().to(dtype).eval()  # without dropout
    past = [joined(model.parameters()).detach()]
    weights_P = past[0].clone()
    losses = []
    optimizer = torch.optim.SGD([weights_P], lr=lr, momentum=momentum)
    batches = Batches(*load_digits("synthetic", "", seed, train=True), batch_size, seed)
    for epoch in range(epochs):
        first = len(past) - 1
        optimizer.param_groups[0]["lr"] = lr * 0.1**epoch
        for _, data, target in batches.of(epoch, range(steps)):
            vector_to_parameters(past[max(first, len(past) - 1 - late)], model.parameters())
            loss = F.nll_loss(model(data.to(dtype)), target)
            weights_P.grad = joined(torch.autograd.grad(loss, list(model.parameters())))
            optimizer.step()
            past.append(weights_P.clone())
            losses.append(loss.item())
    vector_to_parameters(weights_P, model.parameters())
    return losses, model.state_dict()


def joined(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def distributed(tmp_path, steps, *flags, run=run_main):
    """Run main.py; return (losses by trainer, weights by name)."""
    checkpoint = tmp_path / "end.pt"
    flags = (*COMMON, "--no_dropout", "--max_batches", steps, "--checkpoint", checkpoint, *flags)
    done = run("param_server", *flags, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = {}  # in the order in which they were printed, which is that of a trainer's batches
    for trainer, loss in re.findall(r"^Rank (\d+) training batch \d+ loss (\S+)$", done.stdout, re.M):
        losses.setdefault(int(trainer), []).append(float(loss))
    state = torch.load(checkpoint, weights_only=True)["state"]
    return losses, state["model"]


def run_in_float64(_, *flags, timeout):
    return run_script("tests/learning/param_server/float64_job.py", *flags, timeout=timeout)


def assert_same_weights(weights, expected, tolerance=1e-6):
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            weights[name], expected[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


# ----------------------------------------------------------------------------------- servers, called in this process


def arguments(*flags):
    return main.parse_args(["--dataset", "synthetic", *map(str, flags)])


def make_server(mode, *flags):
    """Return the ParameterServer of a mode whose two trainers have many batches to do."""
    args = arguments("--mode", mode, "--world_size", 3, *flags)
    server = main.MODES[mode].ParameterServer(args, torch.device("cpu"))
    server.progress = progress.Progress(args, server, main.RESUME_KEYS)
    server.progress.start()
    server.assignments.deal(range(100))
    return server


def batch(seed, size=4):
    """Return (images [size, 1, 28, 28], labels [size]), which depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 28, 28, generator=generator), torch.randint(0, 10, (size,), generator=generator)
