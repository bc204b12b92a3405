"""Failures that docs/TROUBLESHOOTING.md describes, with torch alone: python symptoms.py SCENE.

A group has two processes. "a" runs the scene and causes the failure, and "b" serves its calls. A scene asserts what
happens without a message, and that the page's advice helps. At its end the program prints what torch has said, as JSON.
"""

import copy
import gc
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import warnings

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

SAID = []  # what torch has said
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


def call(function, *args):
    return rpc.rpc_sync("b", function, args=args)


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


def note_error(function):
    try:
        function()
    except BaseException as error:
        SAID.append(f"{type(error).__name__}: {error}")


def note_warnings(function):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        function()
    SAID.extend(f"{each.category.__name__}: {each.message}" for each in warned)


# ---------------------------------------------------------------------------------------------------- what torch says


def messages():
    note_error(lambda: join(0))
    rref = rpc.remote("b", Agent)
    note_error(lambda: rpc.rpc_sync("b", time.sleep, args=(0.5,), timeout=0.1))
    note_error(lambda: call(only_here))
    note_error(lambda: call(lambda: 1))
    note_error(lambda: call(fail, threading.Lock()))
    note_error(lambda: call(gradients, 0, 1))
    note_error(lambda: call(fail, OurError("a reason")))
    note_error(lambda: call(copy.copy, Agent()).rpc_sync())
    note_error(lambda: call(torch.neg, torch.ones(1, device="meta")))
    note_error(lambda: rpc.rpc_sync("c", gradients, args=(0,)))
    note_error(lambda: rref.local_value())
    note_error(lambda: pickle.dumps(rref))
    note_error(use_rref_of_late_object)
    note_error(lambda: rpc.remote("b", bytes.decode, args=(b"\xff",)).to_here())
    messages_of_autograd()


def use_rref_of_late_object():
    rref = rpc.remote("b", time.sleep, args=(0.3,), timeout=0.1)
    while True:  # the first calls may still get an answer
        rref.to_here()


def messages_of_autograd():
    def step_between(context_id):
        loss = loss_from()
        call(change_weights)
        dist_autograd.backward(context_id, [loss])

    def backward_twice(context_id):
        loss = loss_from()
        dist_autograd.backward(context_id, [loss])
        dist_autograd.backward(context_id, [loss])

    note_error(lambda: in_context(step_between))
    note_error(lambda: in_context(backward_twice))
    note_error(lambda: in_context(lambda _: loss_from().backward()))
    vector = call(forward, torch.ones(2, 3))
    note_error(lambda: in_context(lambda context_id: dist_autograd.backward(context_id, [vector])))
    old_loss = in_context(lambda _: loss_from())
    note_error(lambda: in_context(lambda context_id: dist_autograd.backward(context_id, [old_loss])))
    ended = in_context(lambda context_id: context_id)
    note_error(lambda: dist_autograd.get_gradients(ended))
    parameters = list(layers.parameters())
    note_error(lambda: DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1))
    note_warnings(lambda: DistributedOptimizer(torch.optim.SGD, [RRef(each) for each in parameters], lr=0.1))


# ------------------------------------------------------------------------------------------- what happens in silence


def no_thread_left():
    assert still_waits(lambda: rpc.rpc_sync("b", nested, args=(40,), timeout=0.5))


def list_behind_an_rref():
    copied, made_there = RRef([1]), rpc.remote("b", list)
    copied.rpc_sync().append(2)
    made_there.rpc_sync().append(2)
    assert (copied.to_here(), made_there.to_here()) == ([1], [2])


def memory_grows():
    held = [rpc.remote("b", Counted) for _ in range(5)]
    for rref in held:
        rref.to_here()  # now the object has been made; the copy is deleted immediately
    assert call(counted_alive) == 5
    del rref
    held.clear()
    while call(counted_alive):
        time.sleep(0.02)


def another_thread():
    def gradients_there(run_there, context_id):
        losses, weight = [], torch.ones(1, requires_grad=True)
        run_there(lambda: losses.append(loss_from()))
        dist_autograd.backward(context_id, [losses[0] * weight.sum()])
        assert weight in dist_autograd.get_gradients(context_id)
        return call(gradients, context_id)

    assert in_context(lambda now: gradients_there(lambda function: still_waits(function, 20), now)) == 0
    assert in_context(lambda now: gradients_there(lambda function: function(), now)) == 4


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
    note_error(waiting.wait)
    assert "originated at tensorpipe" in SAID[-1]


def shutdown_after_a_kill():
    kill_b()
    assert still_waits(rpc.shutdown)


def shutdown_with_timeout():
    kill_b()
    note_error(lambda: rpc.shutdown(timeout=1))
    assert "timed out in _all_gather after 1.00 seconds" in SAID[-1], SAID


def shutdown_that_waits_for_nobody():
    kill_b()
    rpc.shutdown(graceful=False)


# ------------------------------------------------------------------------------------------- without another process


def alone():
    assert still_waits(lambda: join(0))


def taken_port():
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    with socket.create_server(("0.0.0.0", 0)) as other:
        os.environ["MASTER_PORT"] = str(other.getsockname()[1])
        note_error(lambda: join(0))


# -------------------------------------------------------------------------------------------------------- all scenes


def join(rank):
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=20)
    rpc.init_rpc("ab"[rank], rank=rank, world_size=2, rpc_backend_options=options)


def run(rank, scene):
    torch.set_num_threads(1)
    if rank == 1:
        del globals()["only_here"]
    note_error(lambda: call(gradients, 0))  # before init_rpc
    if scene not in (alone, taken_port):
        note_warnings(lambda: join(rank))
    if rank == 1:
        time.sleep(600)  # until it is killed
    try:
        scene()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    print(json.dumps(SAID), flush=True)
    os._exit(0)  # after some scenes RPC would wait forever


if __name__ == "__main__":
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    ranks = [mp.get_context("fork").Process(target=run, args=(rank, globals()[sys.argv[1]])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    ranks[0].join()
    ranks[1].kill()
    sys.exit(ranks[0].exitcode)
