"""Failures that docs/TROUBLESHOOTING.md describes, with torch alone: python symptoms.py SCENE."""

import copy
import gc
import os
import signal
import socket
import threading
import time

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from scenes import call, join, main, said, says, scene, stay_alone, warns
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


class Agent:
    pass


class Counted:
    alive = 0

    def __init__(self):
        Counted.alive += 1

    def __del__(self):
        Counted.alive -= 1


class OurError(Exception):
    pass


def only_here():
    """Do nothing. Process b deletes this function from its main module, so that a call cannot find it."""


def counted_alive():
    gc.collect()
    return Counted.alive


def fail(error):
    raise error


def forward(x):
    return layers(x)


def forward_detached(x):
    return layers(x).detach()


def change_weights():
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(1.0)


def gradients(context_id):
    return len(dist_autograd.get_gradients(context_id))


def nested(depth):
    """Call the other process, which calls this one, and so on, `depth` times. Each level blocks an RPC thread."""
    other = "b" if rpc.get_worker_info().name == "a" else "a"
    return rpc.rpc_sync(other, nested, args=(depth - 1,), timeout=0.5) if depth else 0


def loss_from(function=forward):
    return call(function, torch.ones(2, 3)).sum()


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
    parameters = list(layers.parameters())
    rrefs = [RRef(each) for each in parameters]
    says("'Parameter' object", lambda: DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1))
    warns("functional optimizers is deprecated", lambda: DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1))


# ------------------------------------------------------------------------------------------- what happens in silence


@scene("does not even time out")
def no_thread_left():
    assert still_waits(lambda: call(nested, 40, timeout=0.5))


@scene("A list behind an RRef")
def list_behind_an_rref():
    copied, made_there = RRef([1]), rpc.remote("b", list)
    copied.rpc_sync().append(2)
    made_there.rpc_sync().append(2)
    assert (copied.to_here(), made_there.to_here()) == ([1], [2])


@scene("memory of one process grows")
def memory_grows():
    held = [rpc.remote("b", Counted) for _ in range(5)]
    for rref in held:
        rref.to_here()  # now the object has been made; the copy is deleted immediately
    assert call(counted_alive) == 5
    del rref
    held.clear()
    while call(counted_alive):
        time.sleep(0.02)


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
    def waits(make_loss, seconds=2):
        def backward(context_id):
            loss = make_loss()
            return still_waits(lambda: dist_autograd.backward(context_id, [loss]), seconds)

        return in_context(backward)

    def loss_that_was_sent(change):
        loss = torch.ones(3, requires_grad=True).sum()
        call(id, change(loss))  # its answer does not depend on the loss
        return loss

    assert not waits(lambda: loss_from() + loss_from(), seconds=30)
    assert not waits(lambda: (loss_from(), loss_from(forward_detached))[0], seconds=30)
    assert not waits(lambda: loss_that_was_sent(torch.Tensor.detach), seconds=30)
    assert waits(lambda: (loss_from(), loss_from())[0])
    assert waits(lambda: loss_that_was_sent(lambda loss: loss))


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


@scene()
def shutdown_that_waits_for_nobody():
    kill_b()
    rpc.shutdown(graceful=False)


# ------------------------------------------------------------------------------------------- without another process


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
