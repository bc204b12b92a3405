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
    import coordinator
    import main
    import net
    import ranks
    import remote
    import replica

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_test_images(monkeypatch):
    """Drawing the whole test set takes a second, and most of these tests do not need it."""
    images = torch.randint(0, 256, (20, 28, 28), dtype=torch.uint8)
    monkeypatch.setattr(coordinator, "load_digits", lambda *_, **__: (images, torch.arange(20) % 10))


class FakeRRef:
    """Replaces an RRef: calls go to an object in this process, at once."""

    def __init__(self, target):
        self.target = target

    def rpc_async(self, timeout=None):
        """Return an object whose methods return a Future."""
        return Calls(self.target, wait=False)

    def rpc_sync(self, timeout=None):
        """Return an object whose methods return the result."""
        return Calls(self.target, wait=True)


class Calls:
    def __init__(self, target, wait):
        self.target, self.wait = target, wait

    def __getattr__(self, name):
        def call(*args):
            answer = getattr(self.target, name)(*args)
            if not isinstance(answer, torch.futures.Future):  # @rpc.functions.async_execution: is one
                future = torch.futures.Future()
                future.set_result(answer)
                answer = future
            return answer.wait() if self.wait else answer

        return call


def arguments(*flags):
    return main.parse_args(["--dataset", "synthetic", *map(str, flags)])


class Job:
    """A Coordinator and all servers of a job in this process. Its trainers have a batch of 4 images at a time."""

    def __init__(self, *flags, batches=1000, patch=None):
        """`patch`: the fixture monkeypatch, for replica.server_rref."""
        self.args = arguments("--batch_size", 4, *flags)
        self.size = 4 * batches
        self.coordinator = coordinator.Coordinator(self.args, main.RESUME_KEYS)
        self.servers = []
        for rank in range(self.args.num_servers):
            main.MODES[self.args.mode].make_server(rank, self.args, CPU, None if rank else self.coordinator)
            self.servers.append(replica.replica_server if self.args.mode == "replica" else remote.param_server)
        patch.setattr(replica, "server_rref", [FakeRRef(server) for server in self.servers].__getitem__)
        self.server = self.servers[0]
        self.progress = self.coordinator.progress
        self.assignments = self.coordinator.assignments
        self.coordinator.start()

    def ask(self, trainer):
        return self.coordinator.next_assignment(trainer, self.size)

    def assign(self):
        """Let all trainers ask for batches; return {trainer: Assignment or None}."""
        answers = {trainer: self.ask(trainer) for trainer in sorted(self.assignments.living)}
        return {trainer: answer.value() for trainer, answer in answers.items()}

    def push(self, trainer, version=0, value=0.0, images=4, batches=1, server=0):
        """Push a gradient whose elements are all `value` to one server; return the Future of its answer."""
        gradient = torch.full_like(self.servers[server].sgd.weights, value)
        return self.servers[server].push(replica.Push(trainer, version, images, batches, gradient))


@pytest.fixture
def job(monkeypatch):
    """Return a function that makes a Job whose trainers have their first batches."""

    def make(*flags, **how):
        made = Job(*flags, patch=monkeypatch, **how)
        made.assign()
        return made

    return make


@pytest.fixture
def server(job):
    """Return a ParameterServer with two trainers."""
    return job("--no_dropout", "--world_size", 3).server


def batch(seed, size=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 28, 28, generator=generator), torch.randint(0, 10, (size,), generator=generator)


# ------------------------------------------------------------------------- difference 1: the in-place bug


class TutorialServer(remote.ParameterServer):
    """The published forward pass: it uses the shared weights, which other trainers' steps change."""

    def forward(self, trainer, inp):
        self.version_of[trainer] = self.coordinator.updates
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


def test_the_tutorials_way_fails_in_backward(monkeypatch, job):
    monkeypatch.setattr(remote, "ParameterServer", TutorialServer)
    server = job("--no_dropout", "--world_size", 3).server
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward_then_another_trainers_step_then_backward(server)


def test_concurrent_forwards_each_see_one_version_of_the_weights(job):
    """A thread switches between two versions of the weights. Each output must be that of one of the two."""
    server = job("--no_dropout", "--world_size", 5).server
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
    """Return the trainers that saw weights of mixed versions. Four compute while a thread switches the version."""
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
    model = net.Net()  # in training mode, as the tutorial's network on the server always is
    images = torch.randint(0, 256, (200, 28, 28), dtype=torch.uint8)
    data = (images.unsqueeze(1).float() - 255 * 0.1307) / (255 * 0.3081)
    with_dropout = model(data).argmax(dim=1)  # measured as in the tutorial
    labels = model.eval()(data).argmax(dim=1)
    model.train()
    graphs = []
    model.register_forward_hook(lambda module, inputs, output: graphs.append(output.requires_grad))
    assert coordinator.get_accuracy(model, images, labels) == 1.0  # the labels are its own answers without dropout
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
    assert coordinator.get_accuracy(ImagesOnly(), images, labels) == 1.0


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
        match=r"step 0: the sum of rank 1's gradient .* is (nan|inf): training has diverged, try a lower --lr",
    ):
        server.apply_gradients(1)


# ------------------------------------------------------------------------- differences 7 and 8: the network


def test_one_gpu_means_one_gpu():
    assert [str(device) for device in net.devices_of(0)] == ["cpu", "cpu"]
    assert [str(device) for device in net.devices_of(1)] == ["cuda:0", "cuda:0"]
    assert [str(device) for device in net.devices_of(2)] == ["cuda:0", "cuda:1"]


def test_the_networks_dropout_is_not_deprecated_and_the_tutorials_is():
    data, _ = batch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.Net()(data)
        with pytest.raises(UserWarning, match="dropout2d: Received a 2-D input"):
            nn.Dropout2d(0.5)(torch.ones(4, 128))


def test_trainers_are_served_with_dropout_unless_it_is_switched_off(job):
    data, _ = batch(1)
    for flags, repeats in (((), False), (("--no_dropout",), True)):
        forward = job("--world_size", 2, *flags).server.forward
        assert torch.allclose(forward(1, data), forward(1, data)) == repeats


def test_the_network_is_the_tutorials():
    torch.manual_seed(4)
    model = net.Net().eval()
    data, _ = batch(1)
    x = F.max_pool2d(model.conv2(F.relu(model.conv1(data))), 2)
    expected = F.log_softmax(model.fc2(F.relu(model.fc1(torch.flatten(x, 1)))), dim=1)
    torch.testing.assert_close(model(data), expected)
    assert sum(param.numel() for param in model.parameters()) == 1_199_882


# ------------------------------------------------------------------------- difference 9: one optimizer


def test_all_trainers_share_one_momentum(job):
    server = job("--no_dropout", "--world_size", 3, "--momentum", "0.9").server
    reference = net.Net().eval()
    reference.load_state_dict(server.model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.03, momentum=0.9)
    handles = {trainer: remote.ServerSGD([], trainer) for trainer in (1, 2)}
    for step, trainer in enumerate((1, 2, 1, 2)):
        data, target = batch(step)
        F.nll_loss(server.forward(trainer, data), target).backward()
        handles[trainer].step()
        optimizer.zero_grad()
        F.nll_loss(reference(data), target).backward()
        optimizer.step()
    for param, right in zip(server.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, right)


def test_lr_step_divides_the_learning_rate(monkeypatch):
    """By 10 every two epochs, both for the trainers and for the server."""
    one = Job("--lr", 0.5, "--lr_step", 2, "--epochs", 6, "--world_size", 2, batches=1, patch=monkeypatch)
    server = one.server
    data, target = batch(1)
    assigned, used = [], []
    while assignment := one.ask(1).value():
        before = server.model.fc2.bias.detach().clone()
        F.nll_loss(server.forward(1, data), target).backward()
        gradient = server.model.fc2.bias.grad.clone()
        server.apply_gradients(1)
        assigned.append(assignment.lr)
        used.append(((before - server.model.fc2.bias).norm() / gradient.norm()).item())
    assert assigned == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005])
    assert used == pytest.approx(assigned, rel=1e-3)


# ------------------------------------------------------------------------- consistency of replicas


@pytest.fixture
def one_server(job):
    def make(consistency, trainers, *flags, **how):
        return job("--mode", "replica", "--consistency", consistency, "--world_size", trainers + 1, *flags, **how)

    return make


def test_async_answers_each_push_at_once_with_the_weights_after_it(one_server):
    one = one_server("async", 2, "--lr", "0.5")
    before = one.server.sgd.weights.clone()
    for pushes in range(1, 6):
        version, weights = one.push(1, pushes - 1, 1.0).value()
        assert version == pushes
        torch.testing.assert_close(weights, before - 0.5 * pushes)


def test_a_pull_waits_for_the_update_that_is_under_way(one_server):
    """The version and the weights of an answer must be of the same update."""
    one = one_server("async", 2)
    answers = []
    pulling = threading.Thread(target=lambda: answers.append(one.server.pull()))
    with one.server.lock:
        pulling.start()
        pulling.join(0.1)
        assert not answers
    pulling.join(20)
    assert answers[0][0] == 0


def test_an_answer_is_not_changed_by_later_updates(one_server):
    one = one_server("async", 2)
    _, weights = one.push(1, 0, 1.0).value()
    kept = weights.clone()
    one.push(2, 0, 1.0)
    assert torch.equal(weights, kept)


@pytest.mark.parametrize("lead", [0, 1, 3])
def test_bounded_holds_back_a_trainer_that_runs_ahead(one_server, lead):
    one = one_server("bounded", 3, "--max_staleness", lead)
    for _ in range(lead):
        assert one.push(1).done()
    held = one.push(1)
    assert not held.done()
    assert one.coordinator.updates == lead + 1  # applied in spite of that
    one.push(2)
    assert not held.done()  # trainer 3 has not pushed yet
    one.push(3)
    assert held.done()
    assert held.value()[0] == lead + 3  # and it gets the current weights


def test_sync_waits_for_all_and_averages_by_images(one_server):
    one = one_server("sync", 3, "--lr", "1")
    before = one.server.sgd.weights.clone()
    futures = [one.push(t, 0, float(t), images) for t, images in ((3, 2), (1, 4))]
    assert not any(future.done() for future in futures) and one.coordinator.updates == 0
    futures.append(one.push(2, 0, 2.0))
    assert all(future.done() for future in futures) and one.coordinator.updates == 1
    torch.testing.assert_close(futures[0].value()[1], before - (3 * 2 + 1 * 4 + 2 * 4) / 10)


def test_sync_adds_up_in_one_order_whoever_comes_first(one_server):
    results = []
    for order in ((1, 2, 3), (3, 1, 2)):  # in float32 the sum would depend on the order: 1 or 0
        one = one_server("sync", 3, "--lr", 1)
        before = one.server.sgd.weights.clone()
        for trainer in order:
            one.push(trainer, 0, {1: 3e9, 2: -3e9, 3: 3.0}[trainer])
        results.append(one.server.sgd.weights)
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], before - 1)


def test_max_batches_is_for_each_trainer(one_server):
    one = one_server("async", 2, "--max_batches", 3)
    assert one.assignments.dealt == {1: [0, 2, 4], 2: [1, 3, 5]}


def test_staleness_counts_the_updates_between_reading_and_applying(one_server):
    one = one_server("async", 2)
    for _ in range(3):  # three gradients of the first weights: 0, 1, 2 updates late
        one.push(1)
    assert one.coordinator.updates == 3 and one.progress.stale == {0: 1, 1: 1, 2: 1}


def test_staleness_in_mode_remote_counts_the_updates_between_forward_and_step(job):
    one = job("--world_size", 3, "--no_dropout")
    server = one.server
    data, target = batch(1)
    losses = {trainer: F.nll_loss(server.forward(trainer, data), target) for trainer in (1, 2)}
    for trainer in (2, 1):
        losses[trainer].backward()
        server.apply_gradients(trainer)
    assert one.progress.stale == {0: 1, 1: 1} and one.progress.images_applied == [8]


def test_a_push_of_several_batches_strikes_all_of_them(one_server):
    one = one_server("async", 2)
    one.push(1, images=12, batches=3)
    assert one.assignments.dealt[1] == list(range(6, 1000, 2)) and one.progress.images_applied == [12]


@pytest.mark.parametrize("trainers, lead", [(2, 0), (3, 1), (4, 2)])
def test_bounded_bounds_the_staleness_whatever_the_speeds(one_server, trainers, lead):
    """Also with very different speeds, each other trainer makes at most 2 S + 1 updates between a pull and a push."""
    one = one_server("bounded", trainers, "--max_staleness", lead, batches=30 * trainers)

    def train(trainer):
        version = 0
        for _ in range(30):
            if trainer == 1:
                time.sleep(0.003)  # the slow trainer: this is the tested load, not a wait for an event
            version, _ = one.push(trainer, version).wait()

    threads = [threading.Thread(target=train, args=(trainer,)) for trainer in range(1, trainers + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert one.coordinator.updates == 30 * trainers
    assert max(one.progress.stale) <= (trainers - 1) * (2 * lead + 1)


@pytest.mark.parametrize("consistency, lead", [("bounded", 0), ("sync", 0)])
def test_nobody_waits_for_a_trainer_whose_assignment_is_done(one_server, consistency, lead):
    """Three batches for two trainers: the second trainer has only one."""
    one = one_server(consistency, 2, batches=3)
    first_round = [one.push(trainer) for trainer in (2, 1)]
    assert first_round[0].done() and first_round[1].done()
    assert one.push(1).done()
    assert one.assignments.dealt == {1: [], 2: []} and one.progress.images_applied == [12]


def test_with_a_new_assignment_nobody_is_ahead(one_server):
    """Three batches for two trainers: the first trainer has pushed once more when the next epoch begins."""
    one = one_server("bounded", 2, "--max_staleness", 1, "--epochs", 2, batches=3)
    for trainer in (1, 2, 1):
        one.push(trainer)
    one.assign()
    assert one.push(1).done()


# ------------------------------------------------------------------------- a trainer is lost


def test_sync_goes_on_with_the_mean_of_the_living(one_server):
    one = one_server("sync", 3, "--lr", "1")
    before = one.server.sgd.weights.clone()
    mine = [one.push(1, 0, 1.0), one.push(3, 0, 3.0)]
    one.coordinator.on_lost(2)
    assert all(future.done() for future in mine)
    torch.testing.assert_close(mine[0].value()[1], before - 2)
    assert one.coordinator.updates == 1 and one.progress.images_applied == [8]


def test_sync_does_not_apply_what_a_lost_trainer_pushed_for_an_update_that_was_not_made(one_server):
    one = one_server("sync", 3, "--lr", "1")
    before = one.server.sgd.weights.clone()
    one.push(2, 0, 100.0)
    one.coordinator.on_lost(2)
    mine = [one.push(trainer, 0, 1.0) for trainer in (1, 3)]
    torch.testing.assert_close(mine[0].value()[1], before - 1)
    assert len(one.assignments.undealt) == 333


def test_bounded_forgets_the_clock_of_a_lost_trainer(one_server):
    one = one_server("bounded", 2, "--max_staleness", 1)
    one.push(1)
    held = one.push(1)
    assert not held.done()
    one.coordinator.on_lost(2)
    assert held.done() and one.push(1).done()


def test_what_a_lost_trainer_had_not_applied_is_assigned_to_the_living_as_often_as_needed(one_server):
    one = one_server("async", 4, batches=40)
    batches_of_2 = list(one.assignments.dealt[2])
    for _ in range(3):
        one.push(2)
    assert one.coordinator.on_lost(2) == "batches of this epoch that go to the others: 7"
    for trainer in (1, 3, 4):
        for _ in range(10):
            one.push(trainer)
    tasks = {trainer: one.ask(trainer) for trainer in (1, 3, 4)}
    assigned_again = [batch for task in tasks.values() for batch in task.value().batches]
    assert sorted(assigned_again) == batches_of_2[3:]
    one.coordinator.on_lost(1)
    for trainer in (3, 4):
        for _ in tasks[trainer].value().batches:
            one.push(trainer)
        last = one.ask(trainer)
    assert one.assignments.left() == sorted(tasks[1].value().batches)
    assert last.value().epoch == 0  # still the same epoch


def test_a_trainer_that_waits_for_the_epochs_end_is_answered_when_the_last_is_lost(one_server):
    one = one_server("async", 2, batches=10)
    for _ in range(5):
        one.push(1)
    waiting = one.ask(1)
    assert not waiting.done()
    one.coordinator.on_lost(2)
    assert waiting.value().batches == list(range(1, 10, 2))


@pytest.mark.parametrize("consistency", ["async", "bounded", "sync"])
def test_a_late_push_of_a_lost_trainer_is_refused(one_server, consistency):
    one = one_server(consistency, 3)
    before = one.server.sgd.weights.clone()
    one.coordinator.on_lost(2)
    with pytest.raises(ValueError, match="rank 2 was lost; its batches go to other trainers"):
        one.push(2, 0, 1.0)
    assert torch.equal(one.server.sgd.weights, before) and one.coordinator.updates == 0


@pytest.mark.parametrize("mode", ["remote", "replica"])
def test_a_trainer_is_dropped_between_two_updates_and_not_during_one(job, mode):
    one = job("--mode", mode, "--world_size", 3)
    dropping = threading.Thread(target=one.coordinator.on_lost, args=(2,))
    with one.server.lock:  # an update is under way
        dropping.start()
        dropping.join(0.1)
        assert one.assignments.living == {1, 2}
    dropping.join(20)
    assert one.assignments.living == {1}


def test_a_late_step_of_a_lost_trainer_is_refused_and_its_gradient_is_gone(job):
    one = job("--world_size", 3)
    server = one.server
    data, target = batch(1)
    F.nll_loss(server.forward(1, data), target).backward()
    one.coordinator.on_lost(1)
    before = server.model.fc2.bias.clone()
    with pytest.raises(ValueError, match="rank 1 was lost"):
        server.apply_gradients(1)
    assert torch.equal(server.model.fc2.bias, before) and server.model.fc2.bias.grad is None
    with pytest.raises(ValueError, match="rank 1 was lost"):
        server.forward(1, data)


# ------------------------------------------------------------------------- a trainer that sends too much is refused


@pytest.mark.parametrize("consistency, flags", [("sync", ()), ("bounded", ("--max_staleness", 0))])
def test_a_second_push_before_the_answer_to_the_first_is_refused_and_the_first_counts(one_server, consistency, flags):
    one = one_server(consistency, 2, "--lr", 1, *flags)
    before = one.server.sgd.weights.clone()
    first = one.push(1, 0, 1.0)
    assert not first.done()
    with pytest.raises(RuntimeError, match="rank 1 pushed a gradient before its last push was answered"):
        one.push(1, 0, 100.0)
    one.push(2, 0, 3.0)
    torch.testing.assert_close(first.value()[1], before - (2 if consistency == "sync" else 4))
    assert one.progress.images_applied == [8] and set(map(len, one.assignments.dealt.values())) == {499}


def test_a_push_after_the_last_batch_is_refused(one_server):
    one = one_server("async", 2, batches=2)
    one.push(1)
    with pytest.raises(RuntimeError, match="rank 1 sent a gradient after the last batch of its assignment"):
        one.push(1)
    assert one.coordinator.updates == 1 and one.progress.images_applied == [4]


def test_a_second_request_for_batches_is_refused(one_server):
    one = one_server("async", 2, batches=2)
    one.push(1)
    first = one.ask(1)
    with pytest.raises(RuntimeError, match="rank 1 asked for batches before its last request was answered"):
        one.ask(1)
    one.push(2)
    one.ask(2)
    assert first.done()


# ------------------------------------------------------------------------- several servers


@pytest.fixture
def several(job):
    def make(count, *flags):
        return job("--mode", "replica", "--num_servers", count, "--world_size", count + 2, *flags)

    return make


def test_each_server_applies_its_part_at_once_and_with_its_own_momentum(several):
    both = several(2, "--momentum", 0.5, "--lr", 1)
    start = [server.sgd.weights.clone() for server in both.servers]
    for server, values in enumerate([(1.0, 3.0), (3.0, 1.0)]):  # the parts may arrive in another order at each server
        for trainer, value in zip((2, 3), values, strict=True):
            assert both.push(trainer, value=value, server=server).done()
    for server, weights, moved in zip(both.servers, start, (1 + 3.5, 3 + 2.5), strict=True):
        torch.testing.assert_close(server.sgd.weights, weights - moved)
    assert both.coordinator.updates == 2 and both.progress.images_applied == [8]


def test_a_push_that_reached_only_one_server_stays_there_and_counts_if_it_is_the_first(several):
    both = several(2, "--consistency", "sync", "--lr", 1, "--on_lost", "continue")
    before = [server.sgd.weights.clone() for server in both.servers]
    both.push(2, value=1.0, server=0)
    both.push(2, value=1.0, server=1)
    both.push(3, value=3.0, server=0)  # trainer 3 dies before it pushes to the second server
    both.coordinator.on_lost(3)
    for server, weights, moved in zip(both.servers, before, (2, 1), strict=True):
        torch.testing.assert_close(server.sgd.weights, weights - moved)
    assert both.coordinator.updates == 1 and both.progress.images_applied == [8]


def test_a_server_does_not_wait_for_a_trainer_that_was_lost_when_the_assignments_came(several):
    both = several(2, "--consistency", "sync")
    second = both.servers[1]
    second.lose(3)
    second.start(1.0, {2: 1, 3: 1})
    assert both.push(2, server=1).done()


def test_a_server_is_made_by_its_own_process_and_callers_only_find_it():
    """A caller's arguments cannot configure it."""
    for get in (remote.get_parameter_server, replica.get_replica_server, coordinator.get_coordinator):
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


def test_names_of_one_and_of_more_servers():
    args = arguments("--world_size", 3)
    assert [ranks.worker_name(rank, args) for rank in range(3)] == ["server1", "trainer1", "trainer2"]
    args = arguments("--mode", "replica", "--num_servers", 2, "--world_size", 4)
    assert [ranks.worker_name(rank, args) for rank in range(4)] == ["server1", "server2", "trainer1", "trainer2"]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_ranges_cover_all_weights_evenly(servers):
    parts = [replica.range_of(s, servers, 1_199_882) for s in range(servers)]
    assert parts[0].start == 0 and parts[-1].stop == 1_199_882
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1
