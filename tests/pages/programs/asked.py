"""Do what users of torch RPC ask about, with torch alone, and print what happens, as JSON: {name of an answer: answer}.

    python tests/pages/programs/asked.py

A scene is an RPC group of two processes: "a" asks, and "b" serves its calls. All scenes run at the same time. In the
answers, a text that begins with a class is that of an exception.
"""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import io
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import re
import sys
import tempfile
import threading
import traceback

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "harness"))
from jobs import free_port
from programs import ROOT

CONCEPTS = (ROOT / "docs" / "CONCEPTS.md").read_text()
(SCHEDULE,) = re.findall(r"^```python\n(def set_lr.*?)^```", CONCEPTS, re.DOTALL | re.MULTILINE)
exec(SCHEDULE)  # the page's set_lr and set_lr_everywhere

ANSWERS = {}
go_on, late_goes_on = threading.Event(), threading.Event()
two_calls = threading.Barrier(2)
in_the_middle = threading.Event()
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


class Late:
    def __init__(self):
        late_goes_on.wait()

    def name(self):
        return "late"


class Holder:
    def __init__(self, rref):
        self.rref = rref


class Multiplier:
    def __init__(self):
        self.factor = 2

    def times(self, x):
        self.factor += 1
        return x * self.factor


@dataclasses.dataclass
class Message:
    tensor: torch.Tensor


def settings():
    thread = not torch.is_grad_enabled(), torch.get_default_device().type == "meta", torch.is_autocast_enabled("cpu")
    return thread, (torch.get_default_dtype() == torch.float64, torch.are_deterministic_algorithms_enabled())


def number_of_threads():
    return torch.get_num_threads()


def wait_to_go_on():
    go_on.wait()


def let_go_on():
    go_on.set()


def let_late_go_on():
    late_goes_on.set()


def ask_back():
    """Call a function of process a, which needs a thread and the GIL there."""
    return rpc.rpc_sync("a", add, args=(1,))


def add(x, y=1):
    return x + y


@functools.lru_cache
def cached(x):
    return x + 1


@torch.compile(backend="eager")
def compiled(x):
    return x + 1


async def later(x):
    await asyncio.sleep(0)
    return x


def generator(x):
    yield x


def layer_of(rref):
    return type(rref.local_value().layer).__name__


def layer_of_held(holder):
    return holder.rref.rpc_sync().forward(torch.ones(1, 2)).shape


def forward(x):
    return net(x)


def forward_without_grad(x):
    with torch.no_grad():
        return net(x)


def forward_detached(x):
    return net(x).detach()


def forward_frozen(x):
    return frozen(x)


def total(message):
    tensors = message.values() if isinstance(message, dict) else getattr(message, "tensor", message)
    return sum(tensor.sum() for tensor in tensors)


def make_weight():
    global weight
    weight = nn.Parameter(torch.zeros(3))
    return RRef(weight)


def weight_sum():
    return weight.sum()


def get_weight():
    return weight.detach().clone()


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
    if batch[0, 0] == 1:
        ddp(batch).sum().backward()
        return
    in_the_middle.wait()
    try:
        ddp(batch).sum().backward()
    finally:
        go_on.set()


def said(call):
    """Return what `call()` returns, or the exception that it raises, as text."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def stderr_of_cpp(name):
    """Note what the C++ part of torch writes to stderr inside the block."""
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
        file.seek(0)
        ANSWERS[name] = file.read()


def join(rank, rpc_timeout=20, **options):
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, **options)
    rpc.init_rpc("ab"[rank], rank=rank, world_size=2, rpc_backend_options=options)


# ------------------------------------------------------------------------------------------------------- the scenes


def calls(rank):
    if rank == 0:
        ANSWERS["RRef before init_rpc"] = said(lambda: RRef(1))
    join(rank)
    if rank == 1:
        rpc.shutdown()
        return
    proxy()
    operators()
    what_can_be_sent()
    waits()
    rref = rpc.remote("b", Net)
    ANSWERS["RRef copied"] = [
        said(call)
        for call in (
            lambda: copy.deepcopy(Holder(rref)),
            lambda: pickle.dumps(Holder(rref)),
            lambda: torch.save(Holder(rref), io.BytesIO()),
            lambda: multiprocessing.SimpleQueue().put(Holder(rref)),
        )
    ]
    ANSWERS["RRef sent in an object"] = rpc.rpc_sync("b", layer_of_held, args=(Holder(rref),))
    too_large = [said(lambda t=t: rpc.rpc_sync("b", wait_to_go_on, timeout=t)) for t in (float("inf"), 1e9, 2147484)]
    rpc.rpc_sync("b", let_go_on)
    ANSWERS["timeouts too large"] = too_large
    ANSWERS["timeouts"] = [rpc.rpc_sync("b", add, (1,), timeout=t) for t in (2147483, 0, -1)]
    with stderr_of_cpp("torch.profiler"), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        rpc.rpc_sync("b", torch.add, args=(torch.ones(1), 1))
    late = rpc.remote("b", Late)
    ANSWERS["late constructor"] = [said(lambda: late.rpc_sync(timeout=0.2).name())]
    rpc.rpc_sync("b", let_late_go_on)
    ANSWERS["late constructor"] += [late.to_here().name(), said(lambda: late.rpc_sync(timeout=20).name())]
    rpc.shutdown()
    ANSWERS["RRef after shutdown"] = said(rref.to_here)


def proxy():
    rref, x = rpc.remote("b", Net), torch.ones(1, 2)
    ANSWERS["RRef called"] = said(lambda: rref.rpc_sync()(x))
    ANSWERS["attribute called"] = said(lambda: rref.rpc_sync().layer(x))
    ANSWERS["generator returned"] = said(lambda: rref.rpc_sync().parameters())
    ANSWERS["attribute read"] = type(rref.rpc_sync().layer).__name__
    ANSWERS["module returned"] = type(rref.rpc_sync().train(False)).__name__
    ANSWERS["method called"] = list(rref.rpc_sync().forward(x).shape)
    ANSWERS["function with local_value"] = rpc.rpc_sync(rref.owner(), layer_of, args=(rref,))


def operators():
    ones = torch.ones(2, 2)
    refused = [(torch.ones, 2, 2), (torch.tensor, [1.0])]
    wrong = [said(lambda each=each: rpc.rpc_sync("b", each[0], args=each[1:])) for each in refused]
    wrong += [said(lambda: rpc.rpc_sync("b", torch.sum, (ones,), {"axis": 0}))]
    wrong += [said(lambda: rpc.rpc_sync("b", torch.ones, ([2, 2],), {"requires_grad": True}))]
    ANSWERS["operators refused"] = wrong
    several = [said(lambda each=each: rpc.rpc_sync("b", each, args=(ones, 1))) for each in (torch.topk, torch.max)]
    ANSWERS["operators with several results"] = several
    made, summed = rpc.rpc_sync("b", torch.ones, args=([2, 2],)), rpc.rpc_sync("b", torch.sum, (ones,), {"dim": 0})
    ANSWERS["operators"] = made.tolist(), summed.tolist()


def what_can_be_sent():
    multiplier = Multiplier()
    sent = {
        "partial": (functools.partial(add, y=5), 1),
        "bound": (multiplier.times, 1),
        "built-in": (len, [1, 2]),
        "cached": (cached, 1),
    }
    ANSWERS["sent"] = {name: rpc.rpc_sync("b", function, args=(x,)) for name, (function, x) in sent.items()}
    ANSWERS["sent"] |= {"compiled": rpc.rpc_sync("b", compiled, args=(torch.ones(1),)).item()}
    ANSWERS["sent"] |= {"class": type(rpc.rpc_sync("b", Multiplier)).__name__, "its own": multiplier.factor}
    unsent = (later, generator, lambda x: x)
    ANSWERS["not sent"] = [said(lambda each=each: rpc.rpc_sync("b", each, args=(1,))) for each in unsent]


def waits():
    """Wait in four ways for a call that needs Python in this process."""
    ANSWERS["ways to wait"] = [
        rpc.rpc_sync("b", ask_back),
        rpc.rpc_async("b", ask_back).wait(),
        rpc.remote("b", ask_back).to_here(),
        *torch.futures.wait_all([rpc.rpc_async("b", ask_back)]),
    ]


def of_threads(rank):
    Setting()  # on the main thread, before init_rpc
    torch.set_num_threads(2)
    join(rank)
    if rank == 0:
        ANSWERS["number of threads"] = rpc.rpc_sync("b", number_of_threads)
        thread, process = rpc.rpc_sync("b", settings)
        ANSWERS["set before init_rpc"] = {"thread": thread, "process": process}
    rpc.shutdown()


def of_constructors(rank):
    join(rank)
    if rank == 0:
        rref = rpc.remote("b", Setting)
        rref.to_here()
        futures = [rref.rpc_async().settings() for _ in range(2)]
        both = [future.wait() for future in futures]
        threads, processes = ([each[k] for each in both] for k in (0, 1))
        ANSWERS["set in a constructor"] = {"thread": threads, "process": processes}
    rpc.shutdown()


def target_network(rank):
    join(rank, rpc_timeout=2)
    if rank == 1:
        rpc.shutdown()
        return
    x = torch.ones(1, 2)

    def call(function):
        return rpc.rpc_sync("b", function, args=(x,))

    def call_without_grad(function):
        with torch.no_grad():
            return call(function)

    def step(target):
        """`target` is a function, which is called in the context, or the answer of a call before it."""
        with dist_autograd.context() as context_id:
            target = target() if callable(target) else target
            loss = (call(forward) - target).pow(2).sum()  # the backward pass goes through b in any case
            return said(lambda: dist_autograd.backward(context_id, [loss]))

    ANSWERS["target, no cure"] = [
        step(lambda: call_without_grad(forward)),
        step(lambda: call(forward).detach()),
    ]
    ANSWERS["target, cured"] = [
        step(lambda: call(forward_without_grad)),
        step(lambda: call(forward_detached)),
        step(lambda: call(forward_frozen)),
        step(call(forward)),
    ]
    rpc.shutdown()


def gradients(rank):
    join(rank)
    if rank == 1:
        rpc.shutdown()
        return
    found = {}
    for name, pack in {
        "list": lambda x: [x],
        "tuple": lambda x: (x,),
        "dict": lambda x: {"x": x},
        "dataclass": lambda x: Message([x]),
        "twice": lambda x: [x, x],
        "Parameter": lambda x: [nn.Parameter(x)],
    }.items():
        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            sent = pack(x)
            source = sent[0] if name == "Parameter" else x
            dist_autograd.backward(context_id, [rpc.rpc_sync("b", total, args=(sent,))])
            gradient = dist_autograd.get_gradients(context_id).get(source)
            found[name] = None if gradient is None else gradient.tolist()
    ANSWERS["gradient through"] = found
    rpc.shutdown()


def ddp_in_two_calls(rank):
    join(rank)
    if rank == 0:
        rpc.rpc_sync("b", make_ddp)
        first = rpc.rpc_async("b", train, args=(torch.ones(1, 2),))
        second = rpc.rpc_async("b", train, args=(torch.zeros(1, 2),))
        ANSWERS["DDP in two calls"] = said(second.wait)
        first.wait()
    rpc.shutdown()


def optimizers(rank):
    join(rank)
    if rank == 1:
        rpc.shutdown()
        return

    def step(optimizer):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync("b", weight_sum)])
            optimizer.step(context_id)

    def first_step(optimizer_class):
        step(DistributedOptimizer(optimizer_class, [rpc.rpc_sync("b", make_weight)]))
        return round(-rpc.rpc_sync("b", get_weight)[0].item(), 5)

    ANSWERS["default rates"] = [first_step(each) for each in (optim.SGD, SGD, optim.Adamax, Adamax)]
    distributed = DistributedOptimizer(Adam, [rpc.rpc_sync("b", make_weight)], lr=0.1)
    ANSWERS["scheduler"] = said(lambda: optim.lr_scheduler.StepLR(distributed, 1))
    local = nn.Parameter(torch.zeros(3))
    local_optimizer = optim.Adam([local], lr=0.1)
    schedule = optim.lr_scheduler.StepLR(local_optimizer, step_size=2, gamma=0.5)
    equal = []
    for _ in range(6):
        step(distributed)
        local_optimizer.zero_grad()
        local.sum().backward()
        local_optimizer.step()
        schedule.step()
        set_lr_everywhere(distributed, schedule.get_last_lr()[0])  # noqa: F821
        equal.append(torch.equal(rpc.rpc_sync("b", get_weight), local.detach()))
    ANSWERS["schedule equals StepLR"] = equal

    def after_four_steps(count):
        parameters = [rpc.rpc_sync("b", make_weight)]
        made = [DistributedOptimizer(SGD, parameters, lr=0.1, momentum=0.9) for _ in range(count)]
        for number in range(4):
            step(made[number % count])
        return round(rpc.rpc_sync("b", get_weight)[0].item(), 4)

    ANSWERS["momenta"] = [after_four_steps(1), after_four_steps(2)]
    rpc.shutdown()


def shutdown_in_finally(rank):
    try:
        try:
            rpc.init_rpc("observer", rank=rank, world_size=2)
        finally:
            rpc.shutdown()
    except RuntimeError:
        ANSWERS["shutdown in finally"] = traceback.format_exc()


def followers(rank):
    join(rank, num_worker_threads=1 if rank else 16)
    if rank == 1:
        in_the_middle.wait()
        go_on.wait()  # for ever: this process is killed
    rpc.rpc_async("b", stop_in_the_middle, args=(None,))  # takes the only thread of b
    ANSWERS["followers"] = said(lambda: rpc.shutdown(timeout=1))


SCENES = [calls, of_threads, of_constructors, target_network, gradients, ddp_in_two_calls, optimizers]
SCENES += [shutdown_in_finally, followers]


def run_scene(scene, rank, port, answers):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    scene(rank)
    if rank == 0:
        answers.send(ANSWERS)
    os._exit(0)


def main():
    fork = multiprocessing.get_context("fork")
    started = []
    for scene in SCENES:
        answers, sent = fork.Pipe(duplex=False)
        port = free_port()
        ranks = [fork.Process(target=run_scene, args=(scene, rank, port, sent)) for rank in range(2)]
        for each in ranks:
            each.start()
        sent.close()
        started.append((answers, ranks))
    for answers, ranks in started:
        multiprocessing.connection.wait([answers, ranks[0].sentinel])
        if answers.poll():
            with contextlib.suppress(EOFError):  # if it has died: then the tests of its answers fail
                ANSWERS.update(answers.recv())
        for each in ranks:
            each.kill()
    print(json.dumps(ANSWERS))


if __name__ == "__main__":
    main()
