"""param_server's network, its evaluation, and the flags, without RPC."""

import pytest
import torch

from helpers import ROOT, load_module, load_oracle

oracle = load_oracle("param_server")
main, net = oracle.main, oracle.net
pytestmark = pytest.mark.quick


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


# ------------------------------------------------------------------------- differences 7 and 23: the network


def test_one_gpu_means_one_gpu():
    assert net.DEVICES == [("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]


def test_the_network_is_the_tutorials():
    tutorials, model = load_module(ROOT / "param_server" / "tutorial.py").Net().eval(), net.Net().eval()
    tutorials.load_state_dict(model.state_dict())
    images = torch.randn(4, 1, 28, 28)
    torch.testing.assert_close(model(images), tutorials(images))


# ------------------------------------------------------------------------- flags and names


def test_the_defaults_are_the_tutorials_but_for_two():
    """Difference 14."""
    args = main.parse_args([])
    assert (args.mode, args.lr, args.batch_size, args.epochs) == ("remote", 0.03, 32, 1)
    assert (args.master_addr, args.master_port, args.device) == ("localhost", 29500, "cpu")
    assert (args.world_size, args.log_interval) == (3, 100)
