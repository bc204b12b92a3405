"""param_server's network, its evaluation, and the flags, without RPC."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import load_oracle

oracle = load_oracle("param_server")
main, net = oracle.main, oracle.net
pytestmark = pytest.mark.quick


def arguments(*flags):
    return main.parse_args(["--dataset", "synthetic", *map(str, flags)])


def some_images(size=4):
    return torch.randn(size, 1, 28, 28, generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------- difference 2: eval() on the trainer


def test_accuracy_is_measured_without_dropout_where_the_network_is():
    torch.manual_seed(0)
    model = net.Net()  # in training mode, as the tutorial's network on the server always is
    images = torch.randint(0, 256, (600, 28, 28), dtype=torch.uint8)
    data = (images.unsqueeze(1).float() - 255 * 0.1307) / (255 * 0.3081)
    with_dropout = model(data).argmax(dim=1)  # measured as in the tutorial
    labels = model.eval()(data).argmax(dim=1)
    model.train()
    graphs = []
    model.register_forward_hook(lambda module, inputs, output: graphs.append(output.requires_grad))
    assert net.get_accuracy(model, images, labels) == 1.0  # the labels are its own answers without dropout
    assert graphs == [False, False]  # no autograd graph, which would keep every layer's output in memory
    assert (with_dropout == labels).float().mean() < 0.95


# ------------------------------------------------------------------------- differences 7 and 8: the network


def test_one_gpu_means_one_gpu():
    assert net.DEVICES == [("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]


def test_the_networks_dropout_is_not_deprecated_and_the_tutorials_is():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.Net()(some_images())
        with pytest.raises(UserWarning, match="dropout2d: Received a 2-D input"):
            nn.Dropout2d(0.5)(torch.ones(4, 128))


def test_the_network_is_the_tutorials():
    torch.manual_seed(4)
    model = net.Net().eval()
    data = some_images()
    x = F.max_pool2d(model.conv2(F.relu(model.conv1(data))), 2)
    expected = F.log_softmax(model.fc2(F.relu(model.fc1(torch.flatten(x, 1)))), dim=1)
    torch.testing.assert_close(model(data), expected)
    assert sum(param.numel() for param in model.parameters()) == 1_199_882


# ------------------------------------------------------------------------- flags and names


def test_the_defaults_are_the_tutorials_but_for_two():
    """Difference 14."""
    args = main.parse_args([])
    assert (args.mode, args.lr, args.batch_size, args.epochs) == ("remote", 0.03, 32, 1)
    assert (args.master_addr, args.master_port, args.device) == ("localhost", 29500, "cpu")
    assert (args.world_size, args.log_interval) == (3, 100)


def test_ranks_must_agree_on_their_plan():
    flags, args = oracle.scenario.of_the_job(arguments()), arguments("--rank", 1)
    for name in ["lr", "batch_size", "dataset", "max_staleness", "num_servers", "num_gpus", "seed", "mode", "on_lost"]:
        args.given = {name: "another"}
        with pytest.raises(ValueError, match=f"{name} another"):
            oracle.scenario.adopt(flags, args)
    args.given = {"data_dir": "mine", "checkpoint": "my.pt"}  # each trainer reads the images on its own host
    oracle.scenario.adopt(flags, args)
    assert (args.data_dir, args.checkpoint, args.lr) == ("mine", "my.pt", 0.03)
