"""What users of torch RPC ask about, with torch alone: python asked.py SCENE."""

import asyncio
import copy
import dataclasses
import functools
import io
import multiprocessing
import os
import pickle
import threading
import traceback

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from scenes import assert_documented, call, join, main, said, says, scene, stay_alone
from schedule import set_lr_everywhere  # of docs/CONCEPTS.md
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

go_on, in_the_middle, two_calls = threading.Event(), threading.Event(), threading.Barrier(2)
net, frozen, weight = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False), None


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


class Holder:
    def __init__(self, rref):
        self.rref = rref


def add(x, y=1):
    return x + y


def wait_to_go_on():
    go_on.wait()


def let_go_on():
    go_on.set()


# ------------------------------------------------------------------------------------------------------ RRefs and calls


def layer_of(rref):
    return type(rref.local_value().layer).__name__


def layer_of_held(holder):
    return holder.rref.rpc_sync().forward(torch.ones(1, 2)).shape


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
    held = Holder(rpc.remote("b", Net))
    for copied_by in (
        copy.deepcopy,
        pickle.dumps,
        lambda it: torch.save(it, io.BytesIO()),
        lambda it: multiprocessing.SimpleQueue().put(it),
    ):
        says("Can not pickle rref", lambda copied_by=copied_by: copied_by(held))
    assert call(layer_of_held, held) == (1, 2)


def shut_down_too():
    threading.Thread(target=rpc.shutdown).start()


@scene()
def after_shutdown():
    rref = rpc.remote("b", Net)
    call(shut_down_too)
    rpc.shutdown()
    says("has been deleted", rref.to_here)


class Late:
    def __init__(self):
        go_on.wait()

    def name(self):
        return "late"


@scene()
def a_timeout_that_is_over_before_the_constructor_spoils_the_rref():
    late = rpc.remote("b", Late)
    first = said(lambda: late.rpc_sync(timeout=0.2).name())
    assert "more than set timeout (200 ms)" in first
    call(let_go_on)
    assert late.to_here().name() == "late"
    assert said(lambda: late.rpc_sync(timeout=20).name()) == first


@scene()
def the_largest_timeout():
    for timeout in (float("inf"), 1e9, 2147484):
        assert "(-2147483648 ms)" in said(lambda timeout=timeout: call(wait_to_go_on, timeout=timeout))
    call(let_go_on)
    assert [call(add, 1, timeout=timeout) for timeout in (2147483, 0, -1)] == [2, 2, 2]


def ask_back():
    """Call a function of process a, which needs a thread and the GIL there."""
    return rpc.rpc_sync("a", add, args=(1,))


@scene()
def a_thread_that_waits_lets_others_use_python():
    assert call(ask_back) == 2
    assert rpc.rpc_async("b", ask_back).wait() == 2
    assert rpc.remote("b", ask_back).to_here() == 2
    assert torch.futures.wait_all([rpc.rpc_async("b", ask_back)]) == [2]


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
    """What torch writes to stderr, test_torch.py reads."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        call(torch.add, torch.ones(1), 1)


@scene(begin=functools.partial(join, _transports=["shm"], _channels=["basic"]))
def the_shm_transport_does_not_use_dev_shm():
    """20 MB travel over it where /dev/shm has room for 1 MB."""
    room = os.statvfs("/dev/shm")
    assert room.f_frsize * room.f_blocks == 1 << 20
    assert call(torch.sum, torch.ones(5_000_000)) == 5_000_000


# ---------------------------------------------------------------------------- what belongs to a thread, or to a process


class Setting:
    """Its constructor makes settings, and `settings` says which of them hold."""

    def __init__(self):
        torch.set_grad_enabled(False)
        torch.set_default_device("meta")
        torch.set_autocast_enabled("cpu", True)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)

    def settings(self):
        two_calls.wait()  # so that the two calls run on two threads
        return settings()


def settings():
    """Return which of the settings of a thread hold, and which of those of the process."""
    thread = not torch.is_grad_enabled(), torch.get_default_device().type == "meta", torch.is_autocast_enabled("cpu")
    return thread, (torch.get_default_dtype() == torch.float64, torch.are_deterministic_algorithms_enabled())


def number_of_threads():
    return torch.get_num_threads()


def set_and_join(rank):
    Setting()  # on the main thread
    torch.set_num_threads(2)
    join(rank)


@scene(begin=set_and_join)
def what_is_set_before_init_rpc():
    assert call(settings) == ((False, False, False), (True, True))
    assert call(number_of_threads) == 2


@scene("A setting from the constructor is gone")
def what_is_set_in_a_constructor():
    rref = rpc.remote("b", Setting)
    rref.to_here()
    both = torch.futures.wait_all([rref.rpc_async().settings() for _ in range(2)])
    assert (False, False, False) in [thread for thread, _ in both]
    assert [process for _, process in both] == [(True, True)] * 2


# --------------------------------------------------------------------------------------------------- autograd, training


def forward(x):
    return net(x)


def forward_without_grad(x):
    with torch.no_grad():
        return net(x)


def forward_detached(x):
    return net(x).detach()


def forward_frozen(x):
    return frozen(x)


@scene(begin=functools.partial(join, rpc_timeout=2))
def no_grad_in_the_caller_leaves_a_call_in_the_context():
    x = torch.ones(1, 2)

    def call_without_grad(function):
        with torch.no_grad():
            return call(function, x)

    def step(target):
        """`target` is a function, which is called in the context, or the answer of a call before it."""
        with dist_autograd.context() as context_id:
            target = target() if callable(target) else target
            loss = (call(forward, x) - target).pow(2).sum()  # the backward pass goes through b in any case
            dist_autograd.backward(context_id, [loss])

    assert "more than set timeout" in said(lambda: step(lambda: call_without_grad(forward)))
    assert "more than set timeout" in said(lambda: step(lambda: call(forward, x).detach()))
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


class Trained(nn.Module):
    """Its backward pass stops between the layers if the batch begins with 1."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        hidden = self.first(x)
        if x[0, 0] == 1:
            hidden.register_hook(stop_in_the_middle)
        return self.second(hidden)


def stop_in_the_middle(_):
    in_the_middle.set()
    go_on.wait()


def make_ddp():
    global ddp
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = nn.parallel.DistributedDataParallel(Trained())


def train(batch):
    ddp(batch).sum().backward()


def wait_for_the_middle():
    in_the_middle.wait()


@scene()
def ddp_in_two_calls():
    call(make_ddp)
    first = rpc.rpc_async("b", train, args=(torch.ones(1, 2),))
    call(wait_for_the_middle)
    says("Expected to have finished reduction", lambda: call(train, torch.zeros(1, 2)))
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


def join_with_one_thread(rank):
    join(rank, num_worker_threads=1 if rank else 16)


@scene(begin=join_with_one_thread)
def followers():
    rpc.rpc_async("b", stop_in_the_middle, args=(None,))  # takes the only thread of b
    says("Followers […]", lambda: rpc.shutdown(timeout=1))


if __name__ == "__main__":
    main()
