"""What docs/TROUBLESHOOTING.md and other pages say of torch, with torch alone: python asked.py SCENE."""

import asyncio
import copy
import dataclasses
import functools
import gc
import io
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
import types

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from scenes import assert_documented, call, join, main, said, says, scene, stay_alone, warns
from schedule import set_lr_everywhere  # of docs/CONCEPTS.md
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

go_on, two_calls = threading.Event(), threading.Barrier(2)
net, frozen, weight = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3).requires_grad_(False), None


class SGD(optim.SGD):
    pass


class Adam(optim.Adam):
    pass


class Adamax(optim.Adamax):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


def add(x, y=1):
    return x + y


def forward(x):
    return net(x)


def forward_detached(x):
    return net(x).detach()


def loss_from():
    return call(forward, torch.ones(2, 3)).sum()


def gradients(context_id):
    return len(dist_autograd.get_gradients(context_id))


def wait_to_go_on():
    return go_on.wait()


def let_go_on():
    go_on.set()


def in_context(body):
    with dist_autograd.context() as context_id:
        return body(context_id)


def still_waits(function, seconds=2):
    """Return whether `function` has neither returned nor raised an exception after so many seconds."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread.is_alive()


# ---------------------------------------------------------------------------------------------------- what torch says


class Agent:
    pass


class OurError(Exception):
    pass


def only_here():
    """Do nothing. Process b deletes this function from its main module, so that a call cannot find it."""


def fail(error):
    raise error


def change_weights():
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)


def only_b_joins(rank):
    if rank == 1:
        del globals()["only_here"]
        join(rank)


@scene(begin=only_b_joins)
def messages():
    says("RPC has not been initialized", lambda: call(gradients, 0))
    says("Current RPC agent is not set", lambda: RRef(1))
    warns("as a ProcessGroup", lambda: join(0))
    says("RPC is already initialized", lambda: join(0))
    says("ran for more than set timeout", lambda: call(time.sleep, 0.5, timeout=0.1))
    says("Default RPC pickler", lambda: call(only_here))
    says("local object '…<lambda>'", lambda: call(lambda: 1))
    says("'_thread.lock' object", lambda: call(fail, threading.Lock()))
    says("takes 1 positional argument", lambda: call(gradients, 0, 1))
    says("OurError: On WorkerInfo", lambda: call(fail, OurError("a reason")))
    says("'Agent' object has no attribute", lambda: call(copy.copy, Agent()).rpc_sync())
    says("only supports CPU tensors", lambda: call(torch.neg, torch.ones(1, device="meta")))
    says("destination name c", lambda: rpc.rpc_sync("c", gradients, args=(0,)))
    rref = rpc.remote("b", Agent)
    says("can't call localValue()", lambda: rref.local_value())
    says("RRef creation", use_rref_of_late_object)
    says("Failed to create", lambda: rpc.remote("b", bytes.decode, args=(b"\xff",)).to_here())


def use_rref_of_late_object():
    rref = rpc.remote("b", time.sleep, args=(0.3,), timeout=0.1)
    while True:  # the first calls may still get an answer
        rref.to_here()


@scene()
def messages_of_autograd():
    def step_between(context_id):
        loss = loss_from()
        call(change_weights)
        dist_autograd.backward(context_id, [loss])

    def backward_twice(context_id):
        loss = loss_from()
        dist_autograd.backward(context_id, [loss])
        dist_autograd.backward(context_id, [loss])

    says("modified by an inplace operation", lambda: in_context(step_between))
    says("backward through the graph a second time", lambda: in_context(backward_twice))
    says("graphTask_", lambda: in_context(lambda _: loss_from().backward()))
    vector = call(forward, torch.ones(2, 3))
    says("is not a scalar", lambda: in_context(lambda context_id: dist_autograd.backward(context_id, [vector])))
    old_loss = in_context(lambda _: loss_from())
    says("no longer valid", lambda: in_context(lambda context_id: dist_autograd.backward(context_id, [old_loss])))
    ended = in_context(lambda context_id: context_id)
    says("autograd context with id", lambda: dist_autograd.get_gradients(ended))
    parameters = list(net.parameters())
    rrefs = [RRef(each) for each in parameters]
    says("'Parameter' object", lambda: DistributedOptimizer(optim.SGD, parameters, lr=0.1))
    warns("functional optimizers is deprecated", lambda: DistributedOptimizer(optim.SGD, rrefs, lr=0.1))


# ------------------------------------------------------------------------------------------------------ RRefs and calls


def layer_of(rref):
    return type(rref.local_value().layer).__name__


@scene()
def an_rref_is_used_as_if_it_were_the_object():
    rref, x = rpc.remote("b", Net), torch.ones(1, 2)
    says("'RRefProxy' object", lambda: rref.rpc_sync()(x))
    says("type object 'Net'", lambda: rref.rpc_sync().layer(x))
    says("cannot pickle 'generator'", lambda: rref.rpc_sync().parameters())
    assert isinstance(rref.rpc_sync().layer, functools.partial)
    assert isinstance(rref.rpc_sync().train(False), Net)
    assert rref.rpc_sync().forward(x).shape == (1, 2)
    assert call(layer_of, rref) == "Linear"


@scene()
def an_rref_is_refused_by_pickle_and_travels_by_rpc():
    held = types.SimpleNamespace(rref=rpc.remote("b", Net))
    for copied_by in (
        copy.deepcopy,
        pickle.dumps,
        lambda it: torch.save(it, io.BytesIO()),
        lambda it: multiprocessing.SimpleQueue().put(it),
    ):
        says("Can not pickle rref", lambda copied_by=copied_by: copied_by(held))
    assert call(copy.copy, held).rref.rpc_sync().forward(torch.ones(1, 2)).shape == (1, 2)


def shut_down_too():
    threading.Thread(target=rpc.shutdown).start()


@scene()
def after_shutdown():
    rref = rpc.remote("b", Net)
    call(shut_down_too)
    rpc.shutdown()
    says("has been deleted", rref.to_here)


@scene()
def a_timeout_that_is_over_before_the_constructor_spoils_the_rref():
    late = rpc.remote("b", wait_to_go_on)
    first = said(lambda: late.rpc_sync(timeout=0.2).bit_length())
    assert "more than set timeout (200 ms)" in first
    call(let_go_on)
    assert late.to_here() is True
    assert said(lambda: late.rpc_sync(timeout=20).bit_length()) == first


@scene()
def the_largest_timeout():
    for timeout in (float("inf"), 1e9, 2147484):
        assert "(-2147483648 ms)" in said(lambda timeout=timeout: call(wait_to_go_on, timeout=timeout))
    call(let_go_on)
    assert [call(add, 1, timeout=timeout) for timeout in (2147483, 0, -1)] == [2, 2, 2]


def nested(depth):
    """Call the other process, which calls this one, and so on, `depth` times. Each level blocks an RPC thread."""
    other = "b" if rpc.get_worker_info().name == "a" else "a"
    return rpc.rpc_sync(other, nested, args=(depth - 1,), timeout=0.5) if depth else 0


@scene("does not even time out")
def no_thread_left():
    assert still_waits(lambda: call(nested, 40, timeout=0.5))


@scene("A list behind an RRef")
def list_behind_an_rref():
    copied, made_there = RRef([1]), rpc.remote("b", list)
    copied.rpc_sync().append(2)
    made_there.rpc_sync().append(2)
    assert (copied.to_here(), made_there.to_here()) == ([1], [2])


def agents_alive():
    return sum(type(each) is Agent for each in gc.get_objects())


@scene("memory of one process grows")
def memory_grows():
    held = [rpc.remote("b", Agent) for _ in range(5)]
    for rref in held:
        rref.to_here()  # now the object has been made
    assert call(agents_alive) == 5
    del rref
    held.clear()
    while call(agents_alive):
        time.sleep(0.02)


# ----------------------------------------------------------------------------------------------------- what can be sent


class Multiplier:
    def __init__(self):
        self.factor = 2

    def times(self, x):
        self.factor += 1
        return x * self.factor


@functools.lru_cache
def cached(x):
    return x + 1


def compiled(x):
    return x + 1


async def later(x):
    await asyncio.sleep(0)
    return x


def compile_and_join(rank):  # not for each scene: it imports torch._dynamo, which takes seconds
    global compiled
    compiled = torch.compile(compiled, backend="eager")
    join(rank)


@scene(begin=compile_and_join)
def what_can_be_sent():
    multiplier = Multiplier()
    assert call(multiplier.times, 1) == 3 and multiplier.factor == 2  # the object of the bound method was copied
    assert call(functools.partial(add, y=5), 1) == 6
    assert call(len, [1, 2]) == call(cached, 1) == call(compiled, torch.ones(1)) == 2
    assert isinstance(call(Multiplier), Multiplier)
    assert "cannot pickle 'coroutine' object" in said(lambda: call(later, 1))


@scene()
def operators_take_their_arguments_strictly_and_return_one_value():
    ones = torch.ones(2, 2)
    says("Overloaded torch operator", lambda: call(torch.ones, 2, 2))
    says("Overloaded torch operator", lambda: call(torch.tensor, [1.0]))
    says("Overloaded torch operator", lambda: rpc.rpc_sync("b", torch.sum, (ones,), {"axis": 0}))
    says("Overloaded torch operator", lambda: rpc.rpc_sync("b", torch.ones, ([2, 2],), {"requires_grad": True}))
    for operator in (torch.topk, torch.max):  # which return several values
        assert "should be a single IValue" in said(lambda operator=operator: call(operator, ones, 1))
    assert call(torch.ones, [2, 2]).tolist() == [[1, 1], [1, 1]]
    assert rpc.rpc_sync("b", torch.sum, (ones,), {"dim": 0}).tolist() == [2, 2]


@scene()
def under_the_profiler():
    """What torch writes to stderr, test_programs.py reads."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        call(torch.add, torch.ones(1), 1)


# ---------------------------------------------------------------------------- what belongs to a thread, or to a process


class Setting:
    def __init__(self):
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)


def settings():
    """Return which of the settings of a thread hold, and which of those of the process."""
    two_calls.wait()  # so that the two calls run on two threads
    thread = not torch.is_grad_enabled(), torch.get_default_device().type == "meta", torch.is_autocast_enabled("cpu")
    return thread, (torch.get_default_dtype() == torch.float64, torch.are_deterministic_algorithms_enabled())


def settings_in_two_calls():
    return torch.futures.wait_all([rpc.rpc_async("b", settings) for _ in range(2)])


def set_and_join(rank):
    Setting()  # on the main thread
    torch.set_num_threads(2)
    join(rank)


@scene(begin=set_and_join)
def what_is_set_before_init_rpc():
    assert settings_in_two_calls() == [((False, False, False), (True, True))] * 2
    assert call(functools.partial(torch.get_num_threads)) == 2  # by itself it would be an operator, and be refused


@scene("A setting from the constructor is gone")
def what_is_set_in_a_constructor():
    rref = rpc.remote("b", Setting)
    rref.to_here()
    both = settings_in_two_calls()
    assert (False, False, False) in [thread for thread, _ in both]
    assert [process for _, process in both] == [(True, True)] * 2


# --------------------------------------------------------------------------------------------------- autograd, training


def forward_without_grad(x):
    with torch.no_grad():
        return net(x)


def forward_frozen(x):
    return frozen(x)


@scene(begin=functools.partial(join, rpc_timeout=2))
def no_grad_in_the_caller_leaves_a_call_in_the_context():
    x = torch.ones(1, 3)

    def call_without_grad(function):
        with torch.no_grad():
            return call(function, x)

    def step(target):
        """`target` is a function, which is called in the context, or the answer of a call before it."""
        with dist_autograd.context() as context_id:
            target = target() if callable(target) else target
            # The backward pass goes through b in any case. It does not get to the target.
            loss = (call(forward, x) - target.detach()).pow(2).sum()
            dist_autograd.backward(context_id, [loss])

    assert "more than set timeout" in said(lambda: step(lambda: call_without_grad(forward)))
    assert "more than set timeout" in said(lambda: step(lambda: call(forward, x)))
    step(lambda: call(forward_without_grad, x))
    step(lambda: call(forward_detached, x))
    step(lambda: call(forward_frozen, x))
    step(call(forward, x))


@dataclasses.dataclass
class Message:
    tensors: list


def total(message):
    tensors = message.values() if isinstance(message, dict) else getattr(message, "tensors", message)
    return sum(tensor.sum() for tensor in tensors)


@scene()
def a_gradient_flows_through_containers():
    """A Parameter is the exception: see recipe 3."""
    x = torch.ones(2, requires_grad=True)
    for sent, gradient in (([x], 1), ((x,), 1), ({"x": x}, 1), (Message([x]), 1), ([x, x], 2)):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [call(total, sent)])
            assert dist_autograd.get_gradients(context_id)[x].tolist() == [gradient, gradient], sent


def make_ddp():
    global ddp
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = nn.parallel.DistributedDataParallel(net)
    net[1].register_full_backward_hook(stop_in_the_middle)  # the backward pass comes from it, and goes on to net[0]


def stop_in_the_middle(*_):
    rpc.rpc_sync("a", let_go_on)
    go_on.wait()


def train():
    ddp(torch.ones(2, 3)).sum().backward()


@scene()
def ddp_in_two_calls():
    call(make_ddp)
    first = rpc.rpc_async("b", train)
    go_on.wait()
    says("Expected to have finished reduction", lambda: call(train))
    call(let_go_on)
    first.wait()


def make_weight():
    global weight
    weight = nn.Parameter(torch.zeros(3))
    return RRef(weight)


def weight_sum():
    return weight.sum()


def get_weight():
    return weight.detach().clone()


@scene()
def which_optimizers():
    def accepts(optimizer, sparse):
        table = nn.Embedding(3, 2, sparse=sparse)
        try:
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [table(torch.tensor([0])).sum()])
                DistributedOptimizer(optimizer, [RRef(table.weight)], lr=0.1).step(context_id)
        except Exception:
            return False
        return True

    classes = [each for each in vars(optim).values() if isinstance(each, type) and each is not optim.Optimizer]
    assert [each.__name__ for each in classes if not accepts(each, sparse=False)] == ["LBFGS", "SparseAdam"]
    assert [each.__name__ for each in classes if accepts(each, sparse=True)] == ["Adagrad", "SGD", "SparseAdam"]


@scene()
def optimizers():
    def step(optimizer):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [call(weight_sum)])
            optimizer.step(context_id)

    def first_step(optimizer_class):
        step(DistributedOptimizer(optimizer_class, [call(make_weight)]))
        return round(-call(get_weight)[0].item(), 5)

    assert [first_step(each) for each in (optim.SGD, SGD, optim.Adamax, Adamax)] == [0.01, 0.001, 0.001, 0.002]

    distributed = DistributedOptimizer(Adam, [call(make_weight)], lr=0.1)
    says("DistributedOptimizer is not an", lambda: optim.lr_scheduler.StepLR(distributed, 1))
    local = nn.Parameter(torch.zeros(3))
    local_optimizer = optim.Adam([local], lr=0.1)
    schedule = optim.lr_scheduler.StepLR(local_optimizer, step_size=2, gamma=0.5)
    for _ in range(6):
        step(distributed)
        local_optimizer.zero_grad()
        local.sum().backward()
        local_optimizer.step()
        schedule.step()
        set_lr_everywhere(distributed, schedule.get_last_lr()[0])
        assert torch.equal(call(get_weight), local.detach())

    def after_four_steps(count):
        parameters = [call(make_weight)]
        made = [DistributedOptimizer(SGD, parameters, lr=0.1, momentum=0.9) for _ in range(count)]
        for number in range(4):
            step(made[number % count])
        return round(call(get_weight)[0].item(), 4)

    assert after_four_steps(1) == -0.9049  # -0.1 -0.19 -0.271 -0.3439
    assert after_four_steps(2) == -0.58  # two steps of each: -0.1 -0.19 twice


@scene("The loss does not fall")
def another_thread():
    def gradients_there(run_there, context_id):
        losses, weight = [], torch.ones(1, requires_grad=True)
        run_there(lambda: losses.append(loss_from()))
        dist_autograd.backward(context_id, [losses[0] * weight.sum()])
        assert weight in dist_autograd.get_gradients(context_id)
        return call(gradients, context_id)

    assert in_context(lambda now: gradients_there(lambda function: still_waits(function, 20), now)) == 0
    assert in_context(lambda now: gradients_there(lambda function: function(), now)) == 4


@scene("`dist_autograd.backward` does not return")
def backward_waits():
    """Because the loss was sent. The scene about no_grad is about an answer that the loss does not use."""

    def waits(change, seconds):
        def backward(context_id):
            loss = torch.ones(3, requires_grad=True).sum()
            call(id, change(loss))  # its answer does not depend on the loss
            return still_waits(lambda: dist_autograd.backward(context_id, [loss]), seconds)

        return in_context(backward)

    assert waits(lambda loss: loss, seconds=2)
    assert not waits(torch.Tensor.detach, seconds=30)


# -------------------------------------------------------------------------------------------------------------- the end


@scene(begin=stay_alone)
def shutdown_in_finally():
    os.environ["MASTER_PORT"] = "no number"  # so init_rpc fails
    try:
        try:
            join(0)
        finally:
            rpc.shutdown()
    except RuntimeError:
        text = traceback.format_exc()
    assert_documented(text, "During handling of the above")
    first, last = text.split("During handling")
    assert "no number" in first and "RPC has not been initialized" in last


@scene(begin=functools.partial(join, num_worker_threads=1))
def followers():
    rpc.rpc_async("b", wait_to_go_on)  # takes the only thread of b
    says("Followers […]", lambda: rpc.shutdown(timeout=1))


def kill_b():
    victim = call(os.getpid)
    waiting = rpc.rpc_async("b", time.sleep, args=(30,))
    os.kill(victim, signal.SIGKILL)
    return waiting


@scene("`shutdown` does not return")
def shutdown_after_a_kill():
    says("eof (this error", kill_b().wait)
    assert still_waits(rpc.shutdown)


@scene()
def shutdown_with_timeout():
    kill_b()
    assert "timed out in _all_gather after 1.00 seconds" in said(lambda: rpc.shutdown(timeout=1))


@scene("`init_rpc` does not return", begin=stay_alone)
def alone():
    assert still_waits(lambda: join(0))


@scene(begin=stay_alone)
def taken_port():
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    with socket.create_server(("0.0.0.0", 0)) as other:
        os.environ["MASTER_PORT"] = str(other.getsockname()[1])
        says("code: -98", lambda: join(0))


if __name__ == "__main__":
    main()
