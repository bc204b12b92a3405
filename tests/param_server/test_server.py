"""param_server's two servers, called directly in this process: snapshots, one optimizer, and who is held back when."""

import itertools
import threading
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import package_on_path

with package_on_path("param_server"):
    import digits_net
    import flat_weights
    import main
    import remote_server
    import remote_trainer
    import replica_server
    import rpc_names
    import scoreboard


@pytest.fixture(autouse=True)
def few_test_images(monkeypatch):
    """Drawing the whole test set takes a second, which most of these tests do not need."""
    images = torch.randint(0, 256, (20, 28, 28), dtype=torch.uint8)
    monkeypatch.setattr(scoreboard, "load_digits", lambda *_, **__: (images, torch.arange(20) % 10))


def arguments(*flags):
    return main.parse_args(["--dataset", "synthetic", *map(str, flags)])


def batch(seed, size=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 28, 28, generator=generator), torch.randint(0, 10, (size,), generator=generator)


# ------------------------------------------------------------------------- difference 1: the in-place bug


class TutorialServer(remote_server.ParameterServer):
    """The published forward: on the very weights that other trainers' steps change."""

    def forward(self, trainer, inp):
        self.snapshot_of[trainer] = (self.scoreboard.updates, len(inp))
        return self.model(inp)


def forward_then_another_trainers_step_then_backward(server):
    """Return (gradients that trainer 1 gets, gradients it should get) when trainer 2 steps in the middle."""
    (data, target), (other_data, other_target) = batch(1), batch(2)
    params = list(server.model.parameters())
    expected = torch.autograd.grad(F.nll_loss(server.model(data), target), params)
    loss = F.nll_loss(server.forward(1, data), target)
    F.nll_loss(server.forward(2, other_data), other_target).backward()
    server.apply_gradients(2)
    loss.backward()
    return [param.grad for param in params], expected


def test_a_step_between_forward_and_backward_leaves_the_gradients_right():
    server = remote_server.ParameterServer(arguments("--no_dropout", "--world_size", 3))
    gradients, expected = forward_then_another_trainers_step_then_backward(server)
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right)


def test_the_tutorials_way_fails_in_backward():
    server = TutorialServer(arguments("--no_dropout", "--world_size", 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward_then_another_trainers_step_then_backward(server)


def test_concurrent_forwards_each_see_one_version_of_the_weights():
    """Two versions of the weights, flipped by another thread: an output of neither would be a torn snapshot."""
    server = remote_server.ParameterServer(arguments("--no_dropout", "--world_size", 5))
    data, _ = batch(3)
    params = list(server.model.parameters())
    versions = [[param.detach().clone() for param in params], [1.5 * param.detach() for param in params]]

    def put(weights):
        with torch.no_grad():
            for param, weight in zip(params, weights, strict=True):
                param.copy_(weight)

    def look_once(trainer=1):
        return server.forward(trainer, data).detach()

    whole = []
    for weights in versions:
        put(weights)
        whole.append(look_once())
    for cut in range(1, len(params)):  # a snapshot torn anywhere would show in its output
        put(versions[0][:cut] + versions[1][cut:])
        assert not any(torch.allclose(look_once(), one) for one in whole), cut
    stop, torn = threading.Event(), []

    def flip():
        while not stop.is_set():
            for weights in versions:
                with server.lock:
                    put(weights)

    def look(trainer):
        for _ in range(15):
            out = look_once(trainer)
            torn.extend([out] if not any(torch.allclose(out, one) for one in whole) else [])

    flipper = threading.Thread(target=flip)
    lookers = [threading.Thread(target=look, args=(trainer,)) for trainer in range(1, 5)]
    for thread in [flipper, *lookers]:
        thread.start()
    for thread in lookers:
        thread.join()
    stop.set()
    flipper.join()
    assert not torn


# ------------------------------------------------------------------------- difference 2: eval() on the trainer


def test_accuracy_is_measured_without_dropout_where_the_network_is():
    torch.manual_seed(0)
    net = digits_net.Net()  # in training mode, as the network on the server always is
    images = torch.randint(0, 256, (200, 28, 28), dtype=torch.uint8)
    net.eval()
    labels = net((images.unsqueeze(1).float() - 255 * 0.1307) / (255 * 0.3081)).argmax(dim=1)
    net.train()
    assert scoreboard.get_accuracy(net, images, labels) == 1.0  # the labels are what the network says without dropout
    assert net.training  # and training goes on with dropout
    with_dropout = net((images.unsqueeze(1).float() - 255 * 0.1307) / (255 * 0.3081)).argmax(dim=1)
    assert (with_dropout == labels).float().mean() < 0.95  # the tutorial's measurement


def test_the_network_behind_the_rref_takes_images_only(monkeypatch):
    """Difference 5: the tutorial's get_accuracy calls model(data, -1)."""
    monkeypatch.setattr(remote_trainer.rpc, "remote", lambda *_, **__: None)
    net = remote_trainer.TrainerNet(1, torch.device("cpu"))
    with pytest.raises(TypeError, match="positional arguments"):
        net(batch(1)[0], -1)


# --------------------------------------------------------- difference 4: gradients are verified on the server


def test_a_gradient_that_does_not_arrive_is_noticed():
    server = remote_server.ParameterServer(arguments("--world_size", 3))
    data, target = batch(1)
    F.nll_loss(server.forward(1, data), target).backward()
    server.model.fc2.bias.grad = None
    with pytest.raises(RuntimeError, match=r"trainer_1's backward pass brought no gradient for fc2\.bias"):
        server.apply_gradients(1)


def test_a_gradient_is_not_used_twice():
    server = remote_server.ParameterServer(arguments("--world_size", 3))
    data, target = batch(1)
    F.nll_loss(server.forward(1, data), target).backward()
    server.apply_gradients(1)
    server.forward(1, data)
    with pytest.raises(RuntimeError, match="brought no gradient"):
        server.apply_gradients(1)


def test_a_gradient_that_is_not_finite_is_refused():
    server = remote_server.ParameterServer(arguments("--world_size", 3))
    data, target = batch(1)
    (F.nll_loss(server.forward(1, data), target) * float("inf")).backward()
    with pytest.raises(
        ValueError,
        match=r"step 0: the sum of trainer_1's gradient .* is (nan|inf): training has diverged, try a lower --lr",
    ):
        server.apply_gradients(1)


# ------------------------------------------------------------------------- differences 7 and 8: the network


def test_one_gpu_means_one_gpu():
    assert [str(device) for device in digits_net.devices_of(0)] == ["cpu", "cpu"]
    assert [str(device) for device in digits_net.devices_of(1)] == ["cuda:0", "cuda:0"]
    assert [str(device) for device in digits_net.devices_of(2)] == ["cuda:0", "cuda:1"]


def test_the_networks_dropout_is_not_deprecated_and_the_tutorials_is():
    data, _ = batch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        digits_net.Net()(data)
        with pytest.raises(UserWarning, match="dropout2d: Received a 2-D input"):
            nn.Dropout2d(0.5)(torch.ones(4, 128))


def test_the_network_is_the_tutorials():
    torch.manual_seed(4)
    net = digits_net.Net(dropout=False)
    data, _ = batch(1)
    x = F.max_pool2d(net.conv2(F.relu(net.conv1(data))), 2)
    expected = F.log_softmax(net.fc2(F.relu(net.fc1(torch.flatten(x, 1)))), dim=1)
    torch.testing.assert_close(net(data), expected)
    assert sum(param.numel() for param in net.parameters()) == 1_199_882


# ------------------------------------------------------------------------- difference 9: one optimizer


def test_all_trainers_share_one_momentum(monkeypatch):
    args = arguments("--no_dropout", "--world_size", 3, "--momentum", "0.9")
    server = remote_server.ParameterServer(args)
    monkeypatch.setattr(remote_server, "param_server", server)
    reference = digits_net.Net(dropout=False)
    reference.load_state_dict(server.model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=args.lr, momentum=0.9)
    handles = {trainer: remote_server.ServerSGD([], trainer) for trainer in (1, 2)}
    for step, trainer in enumerate((1, 2, 1, 2)):
        data, target = batch(step)
        F.nll_loss(server.forward(trainer, data), target).backward()
        handles[trainer].step()
        optimizer.zero_grad()
        F.nll_loss(reference(data), target).backward()
        optimizer.step()
    for param, right in zip(server.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, right)


@pytest.mark.parametrize("epoch, expected", [(0, 0.5), (1, 0.5), (2, 0.05), (5, 0.005)])
def test_lr_step_divides_the_learning_rate(epoch, expected):
    assert scoreboard.learning_rate(0.5, 2, epoch) == pytest.approx(expected)


# ------------------------------------------------------------------------- consistency of replicas


def one_server(consistency, trainers, *flags):
    args = arguments("--mode", "replica", "--consistency", consistency, "--world_size", trainers + 1, *flags)
    return replica_server.RangeServer(0, args, torch.device("cpu"))


def gradient_of(value, server):
    return torch.full_like(server.range.weights, value).detach()


def test_async_answers_each_push_at_once_with_the_weights_after_it():
    server = one_server("async", 2, "--lr", "0.5")
    before = server.range.weights.detach().clone()
    for pushes in range(1, 6):
        version, lr, weights = server.push(1, pushes - 1, gradient_of(1.0, server), 4, 1).value()
        assert (version, lr) == (pushes, 0.5)
        torch.testing.assert_close(weights, before - 0.5 * pushes)


def test_an_answer_is_a_copy_that_later_updates_do_not_change():
    server = one_server("async", 2)
    _, _, weights = server.push(1, 0, gradient_of(1.0, server), 4, 1).value()
    kept = weights.clone()
    server.push(2, 0, gradient_of(1.0, server), 4, 1)
    assert torch.equal(weights, kept)


@pytest.mark.parametrize("lead", [0, 1, 3])
def test_bounded_holds_back_who_runs_ahead(lead):
    server = one_server("bounded", 3, "--max_staleness", lead)
    for _ in range(lead):
        assert server.push(1, 0, gradient_of(0.0, server), 4, 1).done()
    held = server.push(1, 0, gradient_of(0.0, server), 4, 1)
    assert not held.done()
    assert server.range.version == lead + 1  # applied all the same
    server.push(2, 0, gradient_of(0.0, server), 4, 1)
    assert not held.done()  # trainer 3 is still at 0
    server.push(3, 0, gradient_of(0.0, server), 4, 1)
    assert held.done()
    assert held.value()[0] == lead + 3  # and it gets the weights of now


def test_sync_waits_for_all_and_averages_by_images():
    server = one_server("sync", 3, "--lr", "1")
    before = server.range.weights.detach().clone()
    futures = [server.push(t, 0, gradient_of(float(t), server), images, 1) for t, images in ((3, 2), (1, 4))]
    assert not any(future.done() for future in futures) and server.range.version == 0
    futures.append(server.push(2, 0, gradient_of(2.0, server), 4, 1))
    assert all(future.done() for future in futures) and server.range.version == 1
    torch.testing.assert_close(futures[0].value()[2], before - (3 * 2 + 1 * 4 + 2 * 4) / 10)


def test_staleness_counts_the_updates_between_reading_and_applying():
    server = one_server("async", 2)
    for version in (0, 0, 0):  # three gradients on the first weights: 0, 1, 2 updates late
        server.push(1, version, gradient_of(0.0, server), 4, 1)
    books = server.scoreboard
    assert (books.updates, books.staleness_sum, books.staleness_max) == (3, 3, 2)


@pytest.mark.parametrize("trainers, lead", [(2, 0), (3, 1), (4, 2)])
def test_bounded_bounds_the_staleness_whatever_the_speeds(trainers, lead):
    """Threads of very different speed: between a trainer's pull and push, each other makes at most 2 S + 1 updates."""
    server = one_server("bounded", trainers, "--max_staleness", lead)
    server.range = flat_weights.WeightRange(slice(0, 8), torch.zeros(8), lr=1.0, momentum=0.0)

    def train(trainer):
        version = 0
        for _ in range(30):
            if trainer == 1:
                time.sleep(0.003)  # the slow one: this is the load under test, not a wait for an event
            version, _, _ = server.push(trainer, version, torch.zeros(8), 4, 1).wait()

    threads = [threading.Thread(target=train, args=(trainer,)) for trainer in server.clock]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert server.range.version == 30 * trainers
    assert server.scoreboard.staleness_max <= (trainers - 1) * (2 * lead + 1)


# ------------------------------------------------------------------------- several servers, one checkpoint


class Here:
    """In place of an RRef: calls go to an object in this process."""

    def __init__(self, target):
        self.target = target

    def rpc_async(self):
        return self.target


def two_servers(tmp_path, *flags):
    """Two sync servers and two trainers; a checkpoint at every update."""
    flags = ("--mode", "replica", "--consistency", "sync", "--num_servers", 2, "--world_size", 4, *flags)
    args = arguments(*flags, "--checkpoint", tmp_path / "c.pt", "--checkpoint_every", 1)
    first, second = (replica_server.RangeServer(index, args, torch.device("cpu")) for index in range(2))
    first.others = [Here(second)]
    return first, second


def flat(state):
    return torch.cat([weight.reshape(-1) for weight in state["model"].values()])


def test_a_checkpoint_holds_all_servers_at_the_same_update_and_no_lock_is_held_for_it(tmp_path):
    first, second = two_servers(tmp_path, "--lr", "1")
    before = flat_weights.flatten_parameters(first.net).clone()
    first.push(2, 0, gradient_of(1.0, first), 4, 1)
    saving = threading.Thread(target=first.push, args=(3, 0, gradient_of(1.0, first), 4, 1), daemon=True)
    saving.start()  # update 1 of the first server: it asks the second, which has not got its pushes yet
    deadline = time.monotonic() + 20
    while not second.asked:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert first.lock.acquire(timeout=10)  # whoever else calls is served meanwhile
    first.lock.release()
    assert len(first.pull()[2]) == len(first.range.weights)
    assert saving.is_alive() and not (tmp_path / "c.pt").exists()
    pushes = [second.push(trainer, 0, gradient_of(1.0, second), 4, 1) for trainer in (2, 3)]
    saving.join(20)
    assert all(push.done() for push in pushes) and not saving.is_alive()
    state = torch.load(tmp_path / "c.pt", weights_only=True)["state"]
    assert state["books"]["updates"] == 1 and state["books"]["places"] == [1, 1]
    torch.testing.assert_close(flat(state), before - 1)


def test_in_sync_nobody_goes_on_before_the_checkpoint_has_all_ranges(tmp_path):
    """Else the second server could be at update 2 when it is asked for its range at update 1."""
    first, second = two_servers(tmp_path)
    early = first.push(2, 0, gradient_of(1.0, first), 4, 1)
    saving = threading.Thread(target=first.push, args=(3, 0, gradient_of(1.0, first), 4, 1), daemon=True)
    saving.start()
    while not second.asked:
        time.sleep(0.001)
    assert not early.done()
    for trainer in (2, 3):
        second.push(trainer, 0, gradient_of(1.0, second), 4, 1)
    saving.join(20)
    assert early.done()


@pytest.mark.parametrize("servers", [1, 3])
def test_a_checkpoint_goes_on_with_another_number_of_servers(tmp_path, servers):
    first, second = two_servers(tmp_path, "--momentum", "0.5")
    for server in (second, first):
        for trainer in (2, 3):
            server.push(trainer, 0, gradient_of(1.0, server), 4, 1)
    state = torch.load(tmp_path / "c.pt", weights_only=True)["state"]
    flags = ("--mode", "replica", "--consistency", "sync", "--momentum", "0.5", "--resume")
    flags += ("--num_servers", servers, "--world_size", servers + 2, "--checkpoint", tmp_path / "c.pt")
    resumed = [replica_server.RangeServer(i, arguments(*flags), torch.device("cpu")) for i in range(servers)]
    resumed[0].others = [Here(Answering(server)) for server in resumed[1:]]
    resumed[0].start_epoch(0.03)
    again = resumed[0].capture()
    assert torch.equal(flat(again), flat(state)) and torch.equal(again["momentum"], state["momentum"])
    assert resumed[0].scoreboard.batches_done == {servers: 1, servers + 1: 1}


def test_a_server_lost_while_another_restores_is_a_loss_and_not_a_bad_checkpoint(tmp_path):
    """A ValueError is the user's to mend, and never tried again."""
    first, second = two_servers(tmp_path)
    for server in (second, first):
        for trainer in (2, 3):
            server.push(trainer, 0, gradient_of(1.0, server), 4, 1)
    resumed, lost = two_servers(tmp_path, "--resume")  # reading the file asks nobody
    resumed.others = [Here(Lost(lost))]
    with pytest.raises(RuntimeError, match="eof"):
        resumed.start_epoch(0.03)


class Lost:
    """A server whose process has ended."""

    def __init__(self, server):
        self.server = server

    def begin_epoch(self, *_):
        future = torch.futures.Future()
        future.set_exception(RuntimeError("eof (this error originated at tensorpipe)"))
        return future


class Answering:
    """A server whose plain methods answer with a Future, as they do over RPC."""

    def __init__(self, server):
        self.get_range, self.server = server.get_range, server

    def begin_epoch(self, *args):
        future = torch.futures.Future()
        future.set_result(self.server.begin_epoch(*args))
        return future


def test_a_server_is_made_by_its_own_process_and_callers_only_find_it():
    """No argument of a caller can configure it."""
    assert remote_server.get_parameter_server() is None and replica_server.get_range_server() is None
    for get in (remote_server.get_parameter_server, replica_server.get_range_server):
        with pytest.raises(TypeError):
            get(arguments())


def test_the_defaults_are_the_tutorials_but_for_two():
    """Difference 14."""
    args = main.parse_args([])
    assert (args.mode, args.lr, args.batch_size, args.epochs) == ("remote", 0.03, 32, 1)
    assert (args.master_addr, args.master_port, args.num_gpus) == ("localhost", 29500, 0)
    assert (args.world_size, args.log_interval) == (3, 100)


def test_ranks_must_agree_on_what_more_than_one_of_them_uses():
    agree = set(arguments().agree)
    assert {"lr", "batch_size", "dataset", "consistency", "num_servers", "sync_every", "seed", "mode"} <= agree
    assert not {"checkpoint", "data_dir", "plot", "log_interval"} & agree  # each rank's own


# ------------------------------------------------------------------------- names and ranges


def test_names_of_the_tutorial_and_of_more_servers():
    assert [rpc_names.worker_name(r, arguments("--world_size", 3)) for r in range(3)] == [
        "parameter_server",
        "trainer_1",
        "trainer_2",
    ]
    args = arguments("--mode", "replica", "--num_servers", 2, "--world_size", 4)
    assert [rpc_names.worker_name(r, args) for r in range(4)] == [
        "parameter_server",
        "parameter_server_1",
        "trainer_2",
        "trainer_3",
    ]
    assert list(rpc_names.trainers(args)) == [2, 3]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_ranges_cover_all_weights_evenly(servers):
    parts = [flat_weights.range_of(s, servers, 1_199_882) for s in range(servers)]
    assert parts[0].start == 0 and parts[-1].stop == 1_199_882
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
