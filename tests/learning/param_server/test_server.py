"""param_server's servers, called directly in this process: clones, verified gradients, the network, the flags."""

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import load_oracle, note_lock

oracle = load_oracle("param_server")
arguments, batch, make_server = oracle.arguments, oracle.batch, oracle.make_server
coordinator, evaluation, main, net = oracle.coordinator, oracle.evaluation, oracle.main, oracle.net
progress, ranks, remote, replica = oracle.progress, oracle.ranks, oracle.remote, oracle.replica
sharded = oracle.sharded


@pytest.fixture
def server():
    return make_server("remote", "--no_dropout")


# ------------------------------------------------------------------------- difference 1: the in-place bug


class TutorialServer(remote.ParameterServer):
    """The published forward pass: it uses the shared weights, which other trainers' steps change."""

    def forward(self, trainer, inp):
        self.forwards[trainer] = (len(inp), self.updates)
        return self.model(inp)


def forward_then_another_trainers_step_then_backward(server):
    """Return (gradients of trainer 1, the correct gradients) if trainer 2 makes an update before its backward pass."""
    (data, target), (other_data, other_target) = batch(1), batch(2)
    params = list(server.model.parameters())
    expected = torch.autograd.grad(F.nll_loss(server.model.eval()(data), target), params)
    loss = F.nll_loss(server.forward(1, data), target)
    F.nll_loss(server.forward(2, other_data), other_target).backward()
    server.apply_gradients(2)
    loss.backward()
    return [param.grad for param in params], expected


def test_a_step_between_forward_and_backward_leaves_the_gradients_right(server):
    gradients, expected = forward_then_another_trainers_step_then_backward(server)
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right)


def test_the_tutorials_way_fails_in_backward(monkeypatch):
    monkeypatch.setattr(remote, "ParameterServer", TutorialServer)
    server = make_server("remote", "--no_dropout")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward_then_another_trainers_step_then_backward(server)


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


def test_a_gradient_that_is_not_finite_is_refused(server):
    data, target = batch(1)
    (F.nll_loss(server.forward(1, data), target) * float("inf")).backward()
    with pytest.raises(
        ValueError,
        match=r"step 1: the sum of rank 1's gradient .* is (nan|inf): training has diverged, try a lower --lr",
    ):
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


# ------------------------------------------------------------------------- replicas


@pytest.mark.parametrize("mode", ["replica", "overlap"])
def test_an_answer_is_not_changed_by_later_updates(mode):
    server = make_server(mode)
    _, weights = server.pull()
    kept = weights.clone()
    version, new = server.push(replica.Push(1, 0, 4, torch.ones_like(weights)))
    assert version == 1 and torch.equal(weights, kept)
    torch.testing.assert_close(new, kept - 0.03)
    torch.testing.assert_close(torch.cat([param.reshape(-1) for param in server.model.parameters()]), new)


@pytest.mark.parametrize(("mode", "value"), [("replica", "nan"), ("bounded", "inf"), ("sync", "-inf")])
def test_a_push_that_is_not_finite_is_refused(mode, value):
    server = make_server(mode)
    _, weights = server.pull()
    with pytest.raises(ValueError, match=f"step 1: the sum of rank 2's gradient is {value}: training has diverged"):
        server.push(replica.Push(2, 0, 4, torch.full_like(weights, float(value))))
    assert torch.equal(server.pull()[1], weights)


# ------------------------------------------------------------------------- sharded, a server that is not the first


def make_shard(*flags):
    return sharded.Shard(1, arguments("--mode", "sharded", *flags), torch.device("cpu"))


def test_a_shard_keeps_its_own_range_of_the_weights_only():
    weights = make_shard().weights_R
    assert weights.untyped_storage().nbytes() == weights.nbytes


def test_a_shard_refuses_a_gradient_that_is_not_finite():
    shard = make_shard()
    weights = shard.pull()
    with pytest.raises(ValueError, match="step 1: the sum of a range of a gradient is nan: training has diverged"):
        shard.push(torch.full_like(weights, float("nan")))
    assert torch.equal(shard.pull(), weights)


def test_a_resumed_shard_has_the_momentum_of_its_own_flag():
    stopped, resumed = make_shard("--momentum", 0.9), make_shard("--momentum", 0.5)
    weights = stopped.push(torch.ones_like(stopped.weights_R))
    resumed.load_state_dict(weights, stopped.state_dict(), 0.5)
    torch.testing.assert_close(resumed.push(torch.ones_like(weights)), weights - 0.03 * (0.5 * 1 + 1))


# ------------------------------------------------------------------------- the lock


@pytest.mark.parametrize("mode", main.MODES)
def test_weights_are_read_and_changed_only_under_the_lock(mode):
    """The trainers' calls run at the same time, but Python's own lock mostly hides it if this one is missing."""
    server = make_server(mode, *(("--num_servers", 1) if mode == "sharded" else ()))
    if mode == "remote":
        used = note_lock(server, server.lock, "model", "optimizer", "forwards")
        data, target = batch(1)
        for trainer in (1, 2):
            F.nll_loss(server.forward(trainer, data), target).backward()
            server.apply_gradients(trainer)
    else:
        used = note_lock(server, server.lock, "weights_P", "optimizer", "waiting")
        _, weights = server.pull()
        for trainer in (1, 2):
            server.push(replica.Push(trainer, 0, 4, torch.ones_like(weights)))
    assert server.updates > 0 and len(used) > 5 and all(used)


def test_a_range_of_the_weights_is_read_and_changed_only_under_its_lock():
    """In `sharded`, by a server that is not the first."""
    shard = make_shard()
    used = note_lock(shard, shard.lock, "weights_R", "optimizer", "updates")
    weights = shard.pull()
    assert not torch.equal(shard.push(torch.ones_like(weights)), weights)
    assert len(used) > 5 and all(used)


@pytest.mark.parametrize("mode", ["replica", "sync"])
def test_batches_are_dealt_and_taken_back_only_under_the_lock(mode):
    server = make_server(mode)
    used = note_lock(server, server.lock, "assignments", "idle")
    answers = [server.next_assignment(trainer, 100) for trainer in (1, 2)]
    leading = threading.Thread(target=server.train, args=[range(100)], daemon=True)
    leading.start()
    assert [answer.wait() for answer in answers] == [(0, [*range(0, 100, 2)]), (0, [*range(1, 100, 2)])]
    server.on_lost(2)
    assert server.next_assignment(1, 100).wait() == (0, [*range(100)])  # it had done none of its own either
    with server.lock:
        for _ in range(100):
            server.assignments.strike(1)
    server.next_assignment(1, 100)
    leading.join(60)
    assert not leading.is_alive() and len(used) > 10 and all(used)


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


@pytest.mark.parametrize(
    ("setting", "value"), [("mode", "replica"), ("num_servers", 3), ("seed", 2), ("batch_size", 16), ("max_batches", 5)]
)
def test_a_checkpoint_of_other_batches_or_of_another_mode_is_refused(tmp_path, setting, value):
    file = tmp_path / "other.pt"
    args = arguments("--mode", "sharded", "--checkpoint", file, "--resume")
    settings = {name: vars(args)[name] for name in main.RESUME_KEYS} | {setting: value}
    torch.save({"scenario": "param_server", "settings": settings, "state": {}}, file)
    with pytest.raises(ValueError, match=f"made with --{setting} {value}, and this run has {vars(args)[setting]}"):
        progress.Progress(args, None, main.RESUME_KEYS).start()


@pytest.mark.parametrize("mode", ["remote", "replica"])
def test_a_resumed_run_has_the_momentum_of_its_own_flag(mode):
    saved, resumed = make_server(mode, "--momentum", 0.5), make_server(mode, "--momentum", 0.9)
    resumed.load_state_dict(saved.state_dict())
    assert [group["momentum"] for group in resumed.optimizer.param_groups] == [0.9]


def test_nobody_is_waited_for_when_the_only_trainer_that_works_is_lost():
    leader, asked = make_server("replica"), threading.Event()

    class Living(set):
        def __le__(self, others):  # called under the lock, so on_lost() comes when the thread waits
            asked.set()
            return super().__le__(others)

    leader.assignments.living = Living(leader.assignments.living)
    leader.next_assignment(1, 100)
    waiting = threading.Thread(target=leader.wait_for_trainers, daemon=True)
    waiting.start()
    assert asked.wait(5)
    leader.on_lost(2)
    waiting.join(5)
    assert not waiting.is_alive()


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


@pytest.mark.parametrize("mode", ["remote", "replica"])
def test_each_of_the_largest_seeds_has_its_own_weights(mode):
    weights = [make_server(mode, "--seed", seed).model.fc2.bias for seed in (2**63 - 1, 2**63 - 1, 2**63 - 2)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_server_is_made_by_its_own_process_and_callers_only_find_it():
    """A caller's arguments cannot configure it."""
    with pytest.raises(TypeError):
        coordinator.get_parameter_server(arguments())


@pytest.mark.parametrize("servers, flags", [(1, ()), (3, ("--mode", "sharded", "--num_servers", 3))])
def test_the_trainers_share_the_cores_of_their_host(monkeypatch, servers, flags):
    class Shared(Exception):
        pass

    def share_cores(workers):
        raise Shared(workers)

    monkeypatch.setattr(main, "share_cores", share_cores)
    with pytest.raises(Shared) as shared:
        main.run_worker(0, arguments("--world_size", servers + 4, *flags), SimpleNamespace(ranks_here=servers + 4))
    assert shared.value.args == (4,)


def test_the_defaults_are_the_tutorials_but_for_two():
    """Difference 14."""
    args = main.parse_args([])
    assert (args.mode, args.lr, args.batch_size, args.epochs) == ("remote", 0.03, 32, 1)
    assert (args.master_addr, args.master_port, args.device) == ("localhost", 29500, "cpu")
    assert (args.world_size, args.log_interval) == (3, 100)


def test_ranks_must_agree_on_their_plan():
    agree = set(arguments().must_match)
    assert {"lr", "batch_size", "dataset", "max_staleness", "num_gpus", "seed", "mode", "on_lost"} <= agree
    assert not {"checkpoint", "data_dir", "plot", "log_interval"} & agree  # of one rank alone


def test_names_of_the_ranks():
    args = arguments("--world_size", 3)
    assert [ranks.worker_name(rank, args) for rank in range(3)] == ["server1", "trainer1", "trainer2"]
