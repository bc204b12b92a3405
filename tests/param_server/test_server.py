"""param_server's servers, called directly in this process: clones, one optimizer, and which trainer waits when."""

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
    import main
    import remote_server
    import replica_server
    import rpc_names
    import scoreboard
    import several_servers
    from glue import checkpoint


@pytest.fixture(autouse=True)
def few_test_images(monkeypatch):
    """Drawing the whole test set takes a second, and most of these tests do not need it."""
    images = torch.randint(0, 256, (20, 28, 28), dtype=torch.uint8)
    monkeypatch.setattr(scoreboard, "load_digits", lambda *_, **__: (images, torch.arange(20) % 10))


def arguments(*flags):
    return main.parse_args(["--dataset", "synthetic", *map(str, flags)])


def wait_for_checkpoint(server):
    """Wait until the checkpoint that became due is written; return what a resumed run reads from it."""
    server.scoreboard.last_save.result()
    _, state = checkpoint.load(server.scoreboard.args.checkpoint, "param_server")
    return state


def assigned(server, batches=1000):
    """Let the server's trainers ask for their assignments of an epoch with so many batches; return the server."""
    for trainer in sorted(server.scoreboard.living):
        server.scoreboard.next_assignment(trainer, batches)
    return server


def parameter_server(*flags):
    return assigned(remote_server.ParameterServer(arguments(*flags)))


def batch(seed, size=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 28, 28, generator=generator), torch.randint(0, 10, (size,), generator=generator)


# ------------------------------------------------------------------------- difference 1: the in-place bug


class TutorialServer(remote_server.ParameterServer):
    """The published forward pass: it uses the shared weights, which other trainers' steps change."""

    def forward(self, trainer, inp):
        self.work_of[trainer] = scoreboard.Work(trainer, self.scoreboard.updates, len(inp), 1)
        return self.model(inp)


def forward_then_another_trainers_step_then_backward(server):
    """Return (gradients of trainer 1, the correct gradients) if trainer 2 makes an update before its backward pass."""
    (data, target), (other_data, other_target) = batch(1), batch(2)
    params = list(server.model.parameters())
    expected = torch.autograd.grad(F.nll_loss(server.model(data), target), params)
    loss = F.nll_loss(server.forward(1, data), target)
    F.nll_loss(server.forward(2, other_data), other_target).backward()
    server.apply_gradients(2)
    loss.backward()
    return [param.grad for param in params], expected


def test_a_step_between_forward_and_backward_leaves_the_gradients_right():
    server = parameter_server("--no_dropout", "--world_size", 3)
    gradients, expected = forward_then_another_trainers_step_then_backward(server)
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right)


def test_the_tutorials_way_fails_in_backward():
    server = assigned(TutorialServer(arguments("--no_dropout", "--world_size", 3)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward_then_another_trainers_step_then_backward(server)


def test_concurrent_forwards_each_see_one_version_of_the_weights():
    """A thread switches between two versions of the weights.  Each output must be that of one of the two."""
    server = parameter_server("--no_dropout", "--world_size", 5)
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
    for cut in range(1, len(params)):  # clones of mixed versions would give another output
        put(versions[0][:cut] + versions[1][cut:])
        assert not is_one_of(whole, look_once()), cut
    torn = look_while_weights_flip(server, versions, put, lambda trainer: is_one_of(whole, look_once(trainer)))
    assert not torn


def is_one_of(outputs, output):
    return any(torch.allclose(output, one) for one in outputs)


def look_while_weights_flip(server, versions, put, is_whole):
    """Return the trainers that saw weights of mixed versions.  Four compute while a thread switches the version."""
    stop, torn = threading.Event(), []

    def flip():
        while not stop.is_set():
            for weights in versions:
                with server.lock:
                    put(weights)

    def look(trainer):
        for _ in range(15):
            if not is_whole(trainer):
                torn.append(trainer)

    flipper = threading.Thread(target=flip)
    lookers = [threading.Thread(target=look, args=(trainer,)) for trainer in range(1, 5)]
    for thread in [flipper, *lookers]:
        thread.start()
    for thread in lookers:
        thread.join()
    stop.set()
    flipper.join()
    return torn


# ------------------------------------------------------------------------- difference 2: eval() on the trainer


def test_accuracy_is_measured_without_dropout_where_the_network_is():
    torch.manual_seed(0)
    net = digits_net.Net()  # in training mode, as the tutorial's network on the server always is
    images = torch.randint(0, 256, (200, 28, 28), dtype=torch.uint8)
    net.eval()
    labels = net((images.unsqueeze(1).float() - 255 * 0.1307) / (255 * 0.3081)).argmax(dim=1)
    net.train()
    graphs = []
    net.register_forward_hook(lambda module, inputs, output: graphs.append(output.requires_grad))
    assert scoreboard.get_accuracy(net, images, labels) == 1.0  # the labels are its own answers without dropout
    assert graphs == [False]  # no autograd graph, which would keep every layer's output in memory
    net.train()
    with_dropout = net((images.unsqueeze(1).float() - 255 * 0.1307) / (255 * 0.3081), ("a key",)).argmax(dim=1)
    assert (with_dropout == labels).float().mean() < 0.95  # measured as in the tutorial


class ImagesOnly(nn.Module):
    """A network whose `forward` has the tutorial's arguments. (The one in digits_net.py also has a dropout key.)"""

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
    assert scoreboard.get_accuracy(ImagesOnly(), images, labels) == 1.0


# --------------------------------------------------------- difference 4: gradients are verified on the server


def test_a_gradient_that_does_not_arrive_is_noticed():
    server = parameter_server("--world_size", 3)
    data, target = batch(1)
    F.nll_loss(server.forward(1, data), target).backward()
    server.model.fc2.bias.grad = None
    with pytest.raises(RuntimeError, match=r"trainer_1's backward pass produced no gradient for fc2\.bias"):
        server.apply_gradients(1)


def test_a_gradient_is_not_used_twice():
    server = parameter_server("--world_size", 3)
    data, target = batch(1)
    F.nll_loss(server.forward(1, data), target).backward()
    server.apply_gradients(1)
    server.forward(1, data)
    with pytest.raises(RuntimeError, match="produced no gradient"):
        server.apply_gradients(1)


def test_a_gradient_that_is_not_finite_is_refused():
    server = parameter_server("--world_size", 3)
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
        digits_net.Net()(data, ("a key",))
        with pytest.raises(UserWarning, match="dropout2d: Received a 2-D input"):
            nn.Dropout2d(0.5)(torch.ones(4, 128))


@pytest.mark.parametrize("trainers", [1, 2])
def test_what_is_dropped_depends_on_the_seed_and_the_batch_and_not_on_its_trainer(trainers):
    """So it is the same with fewer trainers, in the other mode, after --resume, and in one process."""
    data, _ = batch(1)
    server = parameter_server("--world_size", trainers + 1, "--seed", 7)
    torch.manual_seed(7)
    net = digits_net.Net()
    for trainer in range(trainers, 0, -1):
        number = trainer - 1  # of the trainer's first batch
        torch.testing.assert_close(server.forward(trainer, data), net(data, (7, "dropout", 0, number)))
    plain, other = net(data), net(data, (7, "dropout", 0, 1000))
    assert not torch.allclose(plain, other) and not torch.allclose(net(data, (7, "dropout", 0, 0)), other)
    one, another = (net.dropout(torch.ones(4, 128), 0.5, ("a key",), layer) for layer in (1, 2))
    assert not torch.equal(one, another)


def test_the_network_is_the_tutorials():
    torch.manual_seed(4)
    net = digits_net.Net()
    data, _ = batch(1)
    x = F.max_pool2d(net.conv2(F.relu(net.conv1(data))), 2)
    expected = F.log_softmax(net.fc2(F.relu(net.fc1(torch.flatten(x, 1)))), dim=1)
    torch.testing.assert_close(net(data), expected)
    assert sum(param.numel() for param in net.parameters()) == 1_199_882


# ------------------------------------------------------------------------- difference 9: one optimizer


def test_all_trainers_share_one_momentum(monkeypatch):
    args = arguments("--no_dropout", "--world_size", 3, "--momentum", "0.9")
    server = assigned(remote_server.ParameterServer(args))
    monkeypatch.setattr(remote_server, "param_server", server)
    reference = digits_net.Net()
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


def test_lr_step_divides_the_learning_rate():
    """By 10 every two epochs, both for the trainers and for the server."""
    server = remote_server.ParameterServer(arguments("--lr", 0.5, "--lr_step", 2, "--epochs", 6, "--world_size", 2))
    data, target = batch(1)
    assigned, used = [], []
    while assignment := server.scoreboard.next_assignment(1, 1).value():
        before = server.model.fc2.bias.detach().clone()
        F.nll_loss(server.forward(1, data), target).backward()
        gradient = server.model.fc2.bias.grad.clone()
        server.apply_gradients(1)
        assigned.append(assignment.lr)
        used.append(((before - server.model.fc2.bias).norm() / gradient.norm()).item())
    assert assigned == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005])
    assert used == pytest.approx(assigned, rel=1e-3)


# ------------------------------------------------------------------------- consistency of replicas


def one_server(consistency, trainers, *flags, batches=1000):
    args = arguments("--mode", "replica", "--consistency", consistency, "--world_size", trainers + 1, *flags)
    return assigned(replica_server.ReplicaServer(args, torch.device("cpu")), batches)


def gradient_of(value, server):
    return torch.full_like(server.sgd.weights, value)


def push(server, trainer, version=0, value=0.0, images=4, batches=1):
    return server.push(push_of(server, trainer, version, value, images, batches))


def push_of(server, trainer, version=0, value=0.0, images=4, batches=1):
    return replica_server.Push(trainer, version, images, batches, gradient_of(value, server))


def test_async_answers_each_push_at_once_with_the_weights_after_it():
    server = one_server("async", 2, "--lr", "0.5")
    before = server.sgd.weights.clone()
    for pushes in range(1, 6):
        version, weights = push(server, 1, pushes - 1, 1.0).value()
        assert version == pushes
        torch.testing.assert_close(weights, before - 0.5 * pushes)


def test_a_pull_waits_for_the_update_that_is_under_way():
    """The version and the weights of an answer must be of the same update."""
    server = one_server("async", 2)
    answers = []
    pulling = threading.Thread(target=lambda: answers.append(server.pull()))
    with server.lock:
        pulling.start()
        pulling.join(0.1)
        assert not answers
    pulling.join(20)
    assert answers[0][0] == 0


def test_an_answer_is_not_changed_by_later_updates():
    server = one_server("async", 2)
    _, weights = push(server, 1, 0, 1.0).value()
    kept = weights.clone()
    push(server, 2, 0, 1.0)
    assert torch.equal(weights, kept)


@pytest.mark.parametrize("lead", [0, 1, 3])
def test_bounded_holds_back_a_trainer_that_runs_ahead(lead):
    server = one_server("bounded", 3, "--max_staleness", lead)
    for _ in range(lead):
        assert push(server, 1).done()
    held = push(server, 1)
    assert not held.done()
    assert server.scoreboard.updates == lead + 1  # applied in spite of that
    push(server, 2)
    assert not held.done()  # trainer 3 has not pushed yet
    push(server, 3)
    assert held.done()
    assert held.value()[0] == lead + 3  # and it gets the current weights


def test_sync_waits_for_all_and_averages_by_images():
    server = one_server("sync", 3, "--lr", "1")
    before = server.sgd.weights.clone()
    futures = [push(server, t, 0, float(t), images) for t, images in ((3, 2), (1, 4))]
    assert not any(future.done() for future in futures) and server.scoreboard.updates == 0
    futures.append(push(server, 2, 0, 2.0))
    assert all(future.done() for future in futures) and server.scoreboard.updates == 1
    torch.testing.assert_close(futures[0].value()[1], before - (3 * 2 + 1 * 4 + 2 * 4) / 10)


def test_sync_adds_up_in_one_order_whoever_comes_first():
    results = []
    for order in ((1, 2, 3), (3, 1, 2)):  # in float32 the sum would depend on the order: 1 or 0
        server = one_server("sync", 3, "--lr", 1)
        before = server.sgd.weights.clone()
        for trainer in order:
            push(server, trainer, 0, {1: 3e9, 2: -3e9, 3: 3.0}[trainer])
        results.append(server.sgd.weights)
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], before - 1)


def test_max_batches_is_for_each_trainer():
    server = one_server("async", 2, "--max_batches", 3)
    assert server.scoreboard.assignments == {1: [0, 2, 4], 2: [1, 3, 5]}


def test_staleness_counts_the_updates_between_reading_and_applying():
    server = one_server("async", 2)
    for _ in range(3):  # three gradients of the first weights: 0, 1, 2 updates late
        push(server, 1)
    assert server.scoreboard.updates == 3 and server.scoreboard.stale == {0: 1, 1: 1, 2: 1}


def test_staleness_in_mode_remote_counts_the_updates_between_forward_and_step():
    server = parameter_server("--world_size", 3, "--no_dropout")
    data, target = batch(1)
    losses = {trainer: F.nll_loss(server.forward(trainer, data), target) for trainer in (1, 2)}
    for trainer in (2, 1):
        losses[trainer].backward()
        server.apply_gradients(trainer)
    assert server.scoreboard.stale == {0: 1, 1: 1} and server.scoreboard.images_applied == [8]


def test_a_push_of_several_batches_strikes_all_of_them():
    server = one_server("async", 2)
    push(server, 1, images=12, batches=3)
    assert server.scoreboard.assignments[1] == list(range(6, 1000, 2)) and server.scoreboard.images_applied == [12]


@pytest.mark.parametrize("trainers, lead", [(2, 0), (3, 1), (4, 2)])
def test_bounded_bounds_the_staleness_whatever_the_speeds(trainers, lead):
    """Also with very different speeds, each other trainer makes at most 2 S + 1 updates between a pull and a push."""
    server = one_server("bounded", trainers, "--max_staleness", lead, batches=30 * trainers)

    def train(trainer):
        version = 0
        for _ in range(30):
            if trainer == 1:
                time.sleep(0.003)  # the slow trainer: this is the tested load, not a wait for an event
            version, _ = push(server, trainer, version).wait()

    threads = [threading.Thread(target=train, args=(trainer,)) for trainer in range(1, trainers + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert server.scoreboard.updates == 30 * trainers
    assert max(server.scoreboard.stale) <= (trainers - 1) * (2 * lead + 1)


@pytest.mark.parametrize("consistency, lead", [("bounded", 0), ("sync", 0)])
def test_nobody_waits_for_a_trainer_whose_assignment_is_done(consistency, lead):
    """Three batches for two trainers: the second trainer has only one."""
    server = one_server(consistency, 2, batches=3)
    first_round = [push(server, trainer) for trainer in (2, 1)]
    assert first_round[0].done() and first_round[1].done()
    assert push(server, 1).done()
    assert server.scoreboard.assignments == {1: [], 2: []} and server.scoreboard.images_applied == [12]


def test_with_a_new_assignment_nobody_is_ahead():
    """Three batches for two trainers: the first trainer has pushed once more when the next epoch begins."""
    server = one_server("bounded", 2, "--max_staleness", 1, "--epochs", 2, batches=3)
    for trainer in (1, 2, 1):
        push(server, trainer)
    assigned(server, batches=3)
    assert push(server, 1).done()


# ------------------------------------------------------------------------- a trainer is lost


def test_sync_goes_on_with_the_mean_of_the_living():
    server = one_server("sync", 3, "--lr", "1")
    before = server.sgd.weights.clone()
    mine = [push(server, 1, 0, 1.0), push(server, 3, 0, 3.0)]
    server.scoreboard.drop(2)
    assert all(future.done() for future in mine)
    torch.testing.assert_close(mine[0].value()[1], before - 2)
    assert server.scoreboard.updates == 1 and server.scoreboard.images_applied == [8]


def test_sync_does_not_apply_what_a_lost_trainer_pushed_for_an_update_that_was_not_made():
    server = one_server("sync", 3, "--lr", "1")
    before = server.sgd.weights.clone()
    push(server, 2, 0, 100.0)
    server.scoreboard.drop(2)
    mine = [push(server, trainer, 0, 1.0) for trainer in (1, 3)]
    torch.testing.assert_close(mine[0].value()[1], before - 1)
    assert len(server.scoreboard.assignments[2]) == 333


def test_bounded_forgets_the_clock_of_a_lost_trainer():
    server = one_server("bounded", 2, "--max_staleness", 1)
    push(server, 1)
    held = push(server, 1)
    assert not held.done()
    server.scoreboard.drop(2)
    assert held.done() and push(server, 1).done()


def test_what_a_lost_trainer_had_not_applied_is_assigned_to_the_living_as_often_as_needed():
    server = one_server("async", 4, batches=40)
    batches_of_2 = list(server.scoreboard.assignments[2])
    for _ in range(3):
        push(server, 2)
    assert server.scoreboard.drop(2) == "batches of this epoch that go to the others: 7"
    for trainer in (1, 3, 4):
        for _ in range(10):
            push(server, trainer)
    tasks = {trainer: server.scoreboard.next_assignment(trainer, 40) for trainer in (1, 3, 4)}
    assigned_again = [batch for task in tasks.values() for batch in task.value().batches]
    assert sorted(assigned_again) == batches_of_2[3:]
    server.scoreboard.drop(1)
    for trainer in (3, 4):
        for _ in tasks[trainer].value().batches:
            push(server, trainer)
        last = server.scoreboard.next_assignment(trainer, 40)
    assert sorted(server.scoreboard.assignments[3] + server.scoreboard.assignments[4]) == sorted(
        tasks[1].value().batches
    )
    assert last.value().epoch == 0  # still the same epoch


def test_a_trainer_that_waits_for_the_epochs_end_is_answered_when_the_last_is_lost():
    server = one_server("async", 2, batches=10)
    for _ in range(5):
        push(server, 1)
    waiting = server.scoreboard.next_assignment(1, 10)
    assert not waiting.done()
    server.scoreboard.drop(2)
    assert waiting.value().batches == list(range(1, 10, 2))


@pytest.mark.parametrize("consistency", ["async", "bounded", "sync"])
def test_a_late_push_of_a_lost_trainer_is_refused(consistency):
    server = one_server(consistency, 3)
    before = server.sgd.weights.clone()
    server.scoreboard.drop(2)
    with pytest.raises(ValueError, match="trainer_2 was lost; its batches go to other trainers"):
        push(server, 2, 0, 1.0)
    assert torch.equal(server.sgd.weights, before) and server.scoreboard.updates == 0


@pytest.mark.parametrize("mode", ["remote", "replica"])
def test_a_trainer_is_dropped_between_two_updates_and_not_during_one(mode):
    server = parameter_server("--world_size", 3) if mode == "remote" else one_server("async", 2)
    dropping = threading.Thread(target=server.scoreboard.drop, args=(2,))
    with server.lock:  # an update is under way
        dropping.start()
        dropping.join(0.1)
        assert server.scoreboard.living == {1, 2}
    dropping.join(20)
    assert server.scoreboard.living == {1}


def test_a_late_step_of_a_lost_trainer_is_refused_and_its_gradient_is_gone():
    server = parameter_server("--world_size", 3)
    data, target = batch(1)
    F.nll_loss(server.forward(1, data), target).backward()
    server.scoreboard.drop(1)
    before = server.model.fc2.bias.clone()
    with pytest.raises(ValueError, match="trainer_1 was lost"):
        server.apply_gradients(1)
    assert torch.equal(server.model.fc2.bias, before) and server.model.fc2.bias.grad is None
    with pytest.raises(ValueError, match="trainer_1 was lost"):
        server.forward(1, data)


# ------------------------------------------------------------------------- a trainer that sends too much is refused


@pytest.mark.parametrize("consistency, flags", [("sync", ()), ("bounded", ("--max_staleness", 0))])
def test_a_second_push_before_the_answer_to_the_first_is_refused_and_the_first_counts(consistency, flags):
    server = one_server(consistency, 2, "--lr", 1, *flags)
    before = server.sgd.weights.clone()
    first = push(server, 1, 0, 1.0)
    assert not first.done()
    with pytest.raises(RuntimeError, match="trainer_1 pushed a gradient before its last push was answered"):
        push(server, 1, 0, 100.0)
    push(server, 2, 0, 3.0)
    torch.testing.assert_close(first.value()[1], before - (2 if consistency == "sync" else 4))
    assert server.scoreboard.images_applied == [8] and set(map(len, server.scoreboard.assignments.values())) == {499}


def test_a_second_part_before_the_first_is_applied_is_refused_and_the_first_counts(monkeypatch):
    first, second = servers = servers_in_this_process(monkeypatch, 2, "--lr", 1)
    assigned(first)
    before = second.sgd.weights.clone()
    answer = push_parts(servers, 2, 0, 1.0)
    with pytest.raises(RuntimeError, match="trainer_2 sent a part of a push before its last push was applied"):
        second.hold(push_of(second, 2, 0, 100.0))  # this server has not got the log with the first push yet
    torch.testing.assert_close(second.catch_up(*answer.value()[2]), before - 1)
    second.hold(push_of(second, 2, 0, 100.0))


def test_a_push_after_the_last_batch_is_refused():
    server = one_server("async", 2, batches=2)
    push(server, 1)
    with pytest.raises(RuntimeError, match="trainer_1 sent a gradient after the last batch of its assignment"):
        push(server, 1)
    assert server.scoreboard.updates == 1 and server.scoreboard.images_applied == [4]


def test_a_second_request_for_batches_is_refused():
    server = one_server("async", 2, batches=2)
    push(server, 1)
    first = server.scoreboard.next_assignment(1, 2)
    with pytest.raises(RuntimeError, match="trainer_1 asked for batches before its last request was answered"):
        server.scoreboard.next_assignment(1, 2)
    push(server, 2)
    server.scoreboard.next_assignment(2, 2)
    assert first.done()


# ------------------------------------------------------------------------- several servers, one checkpoint


class FakeRRef:
    """Replaces an RRef: calls go to an object in this process, at once.  `sent`: (method, arguments) of each call."""

    def __init__(self, target):
        self.target, self.sent = target, []

    def rpc_async(self, timeout=None):
        """Return an object whose methods return a Future."""
        return Calls(self, wait=False)

    def rpc_sync(self, timeout=None):
        """Return an object whose methods return the result."""
        return Calls(self, wait=True)


class Calls:
    def __init__(self, rref, wait):
        self.rref, self.wait = rref, wait

    def __getattr__(self, name):
        def call(*args):
            self.rref.sent.append((name, args))
            answer = getattr(self.rref.target, name)(*args)
            if not isinstance(answer, torch.futures.Future):  # @rpc.functions.async_execution: is one
                future = torch.futures.Future()
                future.set_result(answer)
                answer = future
            return answer.wait() if self.wait else answer

        return call


def servers_in_this_process(monkeypatch, count, *flags):
    """Return all servers of a job with two trainers."""
    args = arguments("--mode", "replica", "--num_servers", count, "--world_size", count + 2, *flags)
    device = torch.device("cpu")
    if count == 1:
        servers = [replica_server.ReplicaServer(args, device)]
    else:
        servers = [several_servers.FirstServer(args, device)]
        servers += [several_servers.RangeServer(index, args, device) for index in range(1, count)]
    references = [FakeRRef(server) for server in servers]
    monkeypatch.setattr(several_servers, "server_rref", references.__getitem__)
    servers[0].scoreboard.resume()
    return servers


def flat(state):
    return torch.cat([weight.reshape(-1) for weight in state["model"].values()])


def push_parts(servers, trainer, version=0, value=0.0):
    """Push as a trainer does: the other servers hold their parts, then the first gets its own.  Return its Future."""
    for other in servers[1:]:
        other.hold(push_of(other, trainer, version, value))
    return push(servers[0], trainer, version, value)


def push_in_turn(servers, value):
    """Let both trainers push.  Each that gets an answer sends its log to the other servers, as a trainer does."""
    first, *others = servers
    version, *_ = first.pull()
    answers = [push_parts(servers, trainer, version, value) for trainer in sorted(first.scoreboard.living)]
    for answer in answers:
        for other in others:
            other.catch_up(*answer.value()[2])


def test_a_push_is_applied_by_all_servers_or_by_none(monkeypatch):
    first, *others = servers = servers_in_this_process(monkeypatch, 3)
    assigned(first)
    before = [server.sgd.weights.clone() for server in servers]
    others[0].hold(push_of(others[0], 3, 0, 1.0))  # then its trainer dies
    _, _, log = push_parts(servers, 4, 0, 2.0).value()  # this trainer dies before it sends the log to the others
    first.scoreboard.drop(3)
    first.scoreboard.drop(4)
    for other in others:
        other.catch_up(*log)
        other.catch_up(*log)  # again, from another trainer: nothing is new
    assert first.scoreboard.updates == 1 and len(first.scoreboard.assignments[3]) == 500
    for server, start in zip(servers, before, strict=True):
        torch.testing.assert_close(server.sgd.weights, start - 0.03 * 2)


def test_what_trainers_carry_to_the_other_servers_stays_short(monkeypatch):
    """The log has only entries that no trainer has sent to all other servers, however long the job is."""
    first, *_ = servers = servers_in_this_process(monkeypatch, 2)
    assigned(first)
    for _ in range(5):
        push_in_turn(servers, 0.0)
    _, _, (start, log) = first.pull()
    assert start + len(log) == 10 == first.scoreboard.updates and len(log) == 2


def test_all_servers_apply_the_same_pushes_in_the_same_order(monkeypatch):
    first, second = servers = servers_in_this_process(monkeypatch, 2, "--momentum", 0.5)
    assigned(first)
    start = [server.sgd.weights.clone() for server in servers]
    logs = [push_parts(servers, *each).value()[2] for each in ((2, 0, 1.0), (3, 0, -7.0))]
    second.catch_up(*logs[1])  # the trainer that pushed last sends its log first
    second.catch_up(*logs[0])
    second.catch_up(*push_parts(servers, 2, 1, 2.0).value()[2])
    for server, weights in zip(servers, start, strict=True):
        velocity = 0.0
        for value in (1.0, -7.0, 2.0):
            velocity = 0.5 * velocity + value
            weights = weights - 0.03 * velocity
        torch.testing.assert_close(server.sgd.weights, weights)


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_checkpoint_holds_all_servers_after_the_same_update(tmp_path, monkeypatch, consistency):
    flags = ("--consistency", consistency, "--lr", 1, "--checkpoint", tmp_path / "c.pt", "--checkpoint_every", 2)
    first, second = servers = servers_in_this_process(monkeypatch, 2, *flags)
    assigned(first)
    before = torch.cat([server.sgd.weights for server in servers])
    disk_is_slow = threading.Event()
    collect = second.captured_at
    second.captured_at = lambda *what: disk_is_slow.wait(20) and collect(*what)  # the other trainers continue meanwhile
    rounds = 1 if consistency == "async" else 2
    for _ in range(rounds):
        push_in_turn(servers, 1.0)
    push_in_turn(servers, 5.0)
    disk_is_slow.set()
    state = wait_for_checkpoint(first)
    assert state["progress"]["updates"] == 2 and state["progress"]["left"] == list(range(2 * rounds, 1000))
    torch.testing.assert_close(flat(state), before - 2)
    assert not second.captured


@pytest.mark.parametrize("servers, trainers", [(1, 2), (3, 1), (2, 3)])
def test_a_checkpoint_goes_on_with_another_number_of_servers_and_trainers(tmp_path, monkeypatch, servers, trainers):
    sync = ("--consistency", "sync", "--momentum", "0.5", "--checkpoint", tmp_path / "c.pt", "--checkpoint_every", 1)
    before = servers_in_this_process(monkeypatch, 2, *sync)
    assigned(before[0])
    for trainer in (2, 3):
        push_parts(before, trainer, 0, 1.0)
    state = wait_for_checkpoint(before[0])
    more = (*sync, "--resume", "--world_size", servers + trainers)
    resumed = assigned(servers_in_this_process(monkeypatch, servers, *more)[0])
    again = resumed.capture()
    assert torch.equal(flat(again), flat(state)) and torch.equal(again["momentum"], state["momentum"])
    assert resumed.scoreboard.assignments == {
        servers + place: list(range(2 + place, 1000, trainers)) for place in range(trainers)
    }


def test_a_server_is_made_by_its_own_process_and_callers_only_find_it():
    """A caller's arguments cannot configure it."""
    for get in (
        remote_server.get_parameter_server,
        replica_server.get_replica_server,
        several_servers.get_range_server,
    ):
        assert get() is None
        with pytest.raises(TypeError):
            get(arguments())


def test_the_defaults_are_the_tutorials_but_for_two():
    """Difference 14."""
    args = main.parse_args([])
    assert (args.mode, args.lr, args.batch_size, args.epochs) == ("remote", 0.03, 32, 1)
    assert (args.master_addr, args.master_port, args.num_gpus) == ("localhost", 29500, 0)
    assert (args.world_size, args.log_interval) == (3, 100)


def test_ranks_must_agree_on_what_more_than_one_of_them_uses():
    agree = set(arguments().must_match)
    assert {"lr", "batch_size", "dataset", "consistency", "num_servers", "sync_every", "seed", "mode"} <= agree
    assert not {"checkpoint", "data_dir", "plot", "log_interval"} & agree  # these may differ between ranks


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
    parts = [several_servers.range_of(s, servers, 1_199_882) for s in range(servers)]
    assert parts[0].start == 0 and parts[-1].stop == 1_199_882
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
