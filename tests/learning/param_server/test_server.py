"""param_server's network and its evaluation, and what a server refuses, called directly in this process."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import load_oracle

oracle = load_oracle("param_server")
arguments, batch, make_server = oracle.arguments, oracle.batch, oracle.make_server
evaluation, main, net, ranks, replica = oracle.evaluation, oracle.main, oracle.net, oracle.ranks, oracle.replica
pytestmark = pytest.mark.quick


@pytest.fixture
def server():
    return make_server("remote", "--no_dropout")


# ------------------------------------------------------------------------- difference 2: eval() on the trainer


def test_accuracy_is_measured_without_dropout_where_the_network_is():
    torch.manual_seed(0)
    model = net.Net()  # in training mode, as the tutorial's network on the server always is
    images = torch.randint(0, 256, (200, 28, 28), dtype=torch.uint8)
    data = (images.unsqueeze(1).float() - 255 * 0.1307) / (255 * 0.3081)
    with_dropout = model(data).argmax(dim=1)  # measured as in the tutorial
    labels = model.eval()(data).argmax(dim=1)
    model.train()
    graphs = []
    model.register_forward_hook(lambda module, inputs, output: graphs.append(output.requires_grad))
    assert evaluation.get_accuracy(model, images, labels) == 1.0  # the labels are its own answers without dropout
    assert graphs == [False]  # no autograd graph, which would keep every layer's output in memory
    assert (with_dropout == labels).float().mean() < 0.95


class ImagesOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x.flatten(1)[:, :10] * self.scale


def test_the_network_is_evaluated_on_images_only():
    """Difference 5: the text's get_accuracy calls model(data, -1), but `forward` has only one argument."""
    images = torch.zeros(20, 28, 28, dtype=torch.uint8)
    labels = torch.arange(20) % 10
    images[range(20), 0, labels] = 255
    assert evaluation.get_accuracy(ImagesOnly(), images, labels) == 1.0


# --------------------------------------------------------- difference 4: gradients are verified on the server


def test_a_gradient_that_does_not_arrive_is_noticed(server):
    data, target = batch(1)
    F.nll_loss(server.forward(1, data), target).backward()
    server.model.fc2.bias.grad = None
    with pytest.raises(RuntimeError, match=r"rank 1's backward pass produced no gradient for fc2\.bias"):
        server.apply_gradients(1)


def test_a_gradient_is_not_used_twice(server):
    data, target = batch(1)
    F.nll_loss(server.forward(1, data), target).backward()
    server.apply_gradients(1)
    server.forward(1, data)
    with pytest.raises(RuntimeError, match="produced no gradient"):
        server.apply_gradients(1)


# ------------------------------------------------------------------------- differences 7 and 8: the network


def test_one_gpu_means_one_gpu():
    assert net.DEVICES == [("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]


def test_the_networks_dropout_is_not_deprecated_and_the_tutorials_is():
    data, _ = batch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.Net()(data)
        with pytest.raises(UserWarning, match="dropout2d: Received a 2-D input"):
            nn.Dropout2d(0.5)(torch.ones(4, 128))


def test_trainers_are_served_with_dropout_unless_it_is_switched_off():
    data, _ = batch(1)
    for flags, repeats in (((), False), (("--no_dropout",), True)):
        forward = make_server("remote", *flags).forward
        assert torch.allclose(forward(1, data), forward(1, data)) == repeats


def test_the_network_is_the_tutorials():
    torch.manual_seed(4)
    model = net.Net().eval()
    data, _ = batch(1)
    x = F.max_pool2d(model.conv2(F.relu(model.conv1(data))), 2)
    expected = F.log_softmax(model.fc2(F.relu(model.fc1(torch.flatten(x, 1)))), dim=1)
    torch.testing.assert_close(model(data), expected)
    assert sum(param.numel() for param in model.parameters()) == 1_199_882


def test_a_resumed_run_measures_when_it_is_due():
    """Batches are dealt up to the next evaluation. With 13 rounds of two trainers, they are at 26, 52, 78 and 100."""
    saved, resumed = make_server("replica"), make_server("replica")
    saved.batch = 26
    resumed.load_state_dict(saved.state_dict())
    answers = [resumed.next_assignment(trainer, 100) for trainer in (1, 2)]
    threading.Thread(target=resumed.lead, args=(4, None), daemon=True).start()
    assert [answer.wait() for answer in answers] == [(0, [*range(26, 52, 2)]), (0, [*range(27, 52, 2)])]


def test_after_a_loss_measuring_cuts_no_update_either():
    """Of three trainers, two are left. With 30 batches and four evaluations, both get as many before the first one."""
    server = make_server("sync", "--world_size", 4)
    server.on_lost(3)
    answers = [server.next_assignment(trainer, 30) for trainer in (1, 2)]
    threading.Thread(target=server.lead, args=(4, None), daemon=True).start()
    assert [answer.wait() for answer in answers] == [(0, [0, 2, 4, 6]), (0, [1, 3, 5, 7])]


@pytest.mark.parametrize("mode", ["remote", "replica"])
def test_a_resumed_run_has_the_momentum_of_its_own_flag(mode):
    saved, resumed = make_server(mode, "--momentum", 0.5), make_server(mode, "--momentum", 0.9)
    resumed.load_state_dict(saved.state_dict())
    assert [group["momentum"] for group in resumed.optimizer.param_groups] == [0.9]


# ------------------------------------------------------------------------- a lost trainer that was only stopped


def test_a_late_step_of_a_lost_trainer_is_refused_and_its_gradient_is_gone(server):
    data, target = batch(1)
    F.nll_loss(server.forward(1, data), target).backward()
    server.on_lost(1)
    before = server.model.fc2.bias.clone()
    with pytest.raises(ValueError, match="trainer1 was lost; its batches go to the others"):
        server.apply_gradients(1)
    assert torch.equal(server.model.fc2.bias, before) and server.model.fc2.bias.grad is None
    with pytest.raises(ValueError, match="trainer1 was lost"):
        server.forward(1, data)


@pytest.mark.parametrize("mode", ["replica", "bounded", "sync"])
def test_a_late_push_of_a_lost_trainer_is_refused(mode):
    server = make_server(mode)
    _, weights = server.pull()
    server.on_lost(2)
    with pytest.raises(ValueError, match="trainer2 was lost; its batches go to the others"):
        server.push(replica.Push(2, 0, 4, torch.ones_like(weights)))
    assert torch.equal(server.pull()[1], weights)
    with pytest.raises(ValueError, match="trainer2 was lost"):
        server.next_assignment(2, 100)


# ------------------------------------------------------------------------- flags and names


def test_each_of_the_largest_seeds_has_its_own_weights():
    weights = [make_server("replica", "--seed", seed).model.fc2.bias for seed in (2**63 - 1, 2**63 - 1, 2**63 - 2)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_the_defaults_are_the_tutorials_but_for_two():
    """Difference 14."""
    args = main.parse_args([])
    assert (args.mode, args.lr, args.batch_size, args.epochs) == ("remote", 0.03, 32, 1)
    assert (args.master_addr, args.master_port, args.device) == ("localhost", 29500, "cpu")
    assert (args.world_size, args.log_interval) == (3, 100)


def test_ranks_must_agree_on_their_plan_and_resumed_runs_on_their_batches():
    agree = set(arguments().must_match)
    assert {"lr", "batch_size", "dataset", "max_staleness", "num_gpus", "seed", "mode", "on_lost"} <= agree
    assert {"mode", "num_servers", "seed", "batch_size", "max_batches"} <= set(main.RESUME_KEYS)
    assert not {"checkpoint", "data_dir", "plot", "log_interval"} & agree  # of one rank alone


def test_names_of_the_ranks():
    args = arguments("--world_size", 3)
    assert [ranks.worker_name(rank, args) for rank in range(3)] == ["server1", "trainer1", "trainer2"]
