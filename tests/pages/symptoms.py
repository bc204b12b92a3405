"""Cause the failures that docs/TROUBLESHOOTING.md explains, with torch alone.

Print a dict {piece of an entry of the page: the text that was seen}. For a failure without a message, the
text is "seen" if it happened as the page describes, and "" if it did not.

    python tests/pages/symptoms.py
    unshare --uts python tests/pages/symptoms.py nameless_host    # also the scene that gives the host another name

A scene is an RPC group of two processes: "a" causes the failure, and "b" serves its calls. Several scenes run at the
same time.
"""

import contextlib
import copy
import gc
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "harness"))
from jobs import free_port

SEEN = {}
second_has_run = threading.Event()
finished = []
meetings = []
layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3))


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


def first():
    second_has_run.wait()
    finished.append("first")


def second():
    finished.append("second")
    second_has_run.set()


def get_finished():
    return finished


@rpc.functions.async_execution
def reject():
    future = torch.futures.Future()
    future.set_exception(ValueError("closed"))
    return future


def sum_over_ranks():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def counted_alive():
    gc.collect()
    return Counted.alive


def fail(error):
    raise error


def forward(x):
    return layers(x)


def change_weights():
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(1.0)


def parameter_rrefs():
    return [RRef(parameter) for parameter in layers.parameters()]


def gradients(context_id):
    return len(dist_autograd.get_gradients(context_id))


def in_training():
    return layers.training


def nested(depth):
    """Call the other process, which calls this one, and so on, `depth` times. Each level blocks an RPC thread."""
    other = "b" if rpc.get_worker_info().name == "a" else "a"
    return rpc.rpc_sync(other, nested, args=(depth - 1,), timeout=0.5) if depth else 0


def note_error(symptom, call):
    """Call `call()`, and note the exception that it raises."""
    try:
        call()
    except BaseException as error:
        SEEN[symptom] = f"{type(error).__name__}: {error}"


def note_event(symptom, happened):
    """Note whether a failure without a message has happened."""
    SEEN[symptom] = "seen" if happened else ""


def still_waits(call, seconds):
    """Return True if, after this many seconds, `call` has neither returned nor raised an exception."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return thread.is_alive()


@contextlib.contextmanager
def stderr_of_cpp(symptom):
    """Note what the C++ part of torch writes to stderr inside the block."""
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
        file.seek(0)
        SEEN[symptom] = file.read()


def join(rank, name=None, **options):
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=20, **options)
    rpc.init_rpc(name or "ab"[rank], rank=rank, world_size=2, rpc_backend_options=options)


# ------------------------------------------------------------------------------------------------------- the scenes


def calls(rank):
    note_error("RPC has not been initialized", lambda: rpc.rpc_sync("b", gradients, args=(0,)))
    if rank == 1:
        del sys.modules["__main__"].only_here
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        join(rank)
    SEEN["as a ProcessGroup"] = "\n".join(f"{each.category.__name__}: {each.message}" for each in warned)
    if rank == 1:
        rpc.shutdown()
        return
    rref = rpc.remote("b", Agent)
    note_error("ran for more than set timeout", lambda: rpc.rpc_sync("b", time.sleep, args=(0.5,), timeout=0.1))
    note_error("Can't get attribute", lambda: rpc.rpc_sync("b", only_here))
    note_error("local object '…<lambda>'", lambda: rpc.rpc_sync("b", lambda: 1))
    note_error("_thread.lock", lambda: rpc.rpc_sync("b", fail, args=(threading.Lock(),)))
    note_error("positional argument", lambda: rpc.rpc_sync("b", gradients, args=(0, 1)))
    note_error("could not find destination name", lambda: rpc.rpc_sync("c", gradients, args=(0,)))
    note_error("OurError: On WorkerInfo", lambda: rpc.rpc_sync("b", fail, args=(OurError("a reason"),)))
    note_error("'Agent' object has no attribute", lambda: rpc.rpc_sync("b", copy.copy, args=(Agent(),)).rpc_sync())
    note_error("localValue() on user", lambda: rref.local_value())
    note_error("Can not pickle rref", lambda: pickle.dumps(rref))
    note_error("RPC is already initialized", lambda: join(rank))
    note_error("RRef creation", use_rref_of_late_object)
    failed = rpc.remote("b", fail, args=(ValueError("a reason"),))  # raises no exception
    try:
        failed.to_here()
    except ValueError as error:
        note_event("`remote` runs fails", "a reason" in str(error))
    note_error("Failed to create", lambda: rpc.remote("b", bytes.decode, args=(b"\xff",)).to_here())
    of_list = RRef([1])
    of_list.rpc_sync().append(2)
    note_event("A list behind an RRef", of_list.to_here() == [1])
    torch.futures.wait_all([rpc.rpc_async("b", first), rpc.rpc_async("b", second)])
    note_event("Calls finish in another order", rpc.rpc_sync("b", get_finished) == ["second", "first"])
    SEEN["ValueError('closed')"] = repr(rpc.rpc_sync("b", reject))
    note_error("only supports CPU tensors", lambda: rpc.rpc_sync("b", torch.neg, args=(torch.ones(1, device="meta"),)))
    autograd()
    held = [rpc.remote("b", Counted) for _ in range(5)]
    [each.to_here() for each in held]  # now all objects have been made; the copies are deleted at once
    many = rpc.rpc_sync("b", counted_alive)
    held.clear()
    deadline = time.monotonic() + 5
    while rpc.rpc_sync("b", counted_alive) and time.monotonic() < deadline:
        time.sleep(0.02)
    note_event("memory of one process grows", (many, rpc.rpc_sync("b", counted_alive)) == (5, 0))
    layers.eval()  # those of process a
    note_event("Dropout stays on in another process", rpc.rpc_sync("b", in_training))
    rpc.shutdown()


def use_rref_of_late_object():
    rref = rpc.remote("b", time.sleep, args=(0.3,), timeout=0.1)
    while True:  # the first calls may still get an answer
        rref.to_here()


def autograd():
    def forward_there():
        return rpc.rpc_sync("b", forward, args=(torch.ones(2, 3),)).sum()

    def step_between(context_id):
        loss = forward_there()
        rpc.rpc_sync("b", change_weights)
        dist_autograd.backward(context_id, [loss])

    def backward_twice(context_id):
        loss = forward_there()
        dist_autograd.backward(context_id, [loss])
        dist_autograd.backward(context_id, [loss])

    def in_context(body):
        with dist_autograd.context() as context_id:
            return body(context_id)

    note_error("modified by an inplace operation", lambda: in_context(step_between))
    note_error("graphTask_", lambda: in_context(lambda context_id: forward_there().backward()))
    roots = rpc.rpc_sync("b", forward, args=(torch.ones(2, 3),))
    note_error("all roots need to be scalar", lambda: in_context(lambda now: dist_autograd.backward(now, [roots])))
    note_error("graph a second time", lambda: in_context(backward_twice))
    loss = in_context(lambda context_id: forward_there())
    note_error("Autograd context no longer valid", lambda: in_context(lambda now: dist_autograd.backward(now, [loss])))
    ended = in_context(lambda context_id: context_id)
    note_error("Could not find autograd context", lambda: dist_autograd.get_gradients(ended))
    note_error(
        "has no attribute 'owner'", lambda: DistributedOptimizer(torch.optim.SGD, list(layers.parameters()), lr=0.1)
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        DistributedOptimizer(torch.optim.SGD, [RRef(parameter) for parameter in layers.parameters()], lr=0.1)
    SEEN["functional optimizers"] = "\n".join(f"{each.category.__name__}: {each.message}" for each in warned)

    def gradient_of_sent(parameter, sent, context_id):
        dist_autograd.backward(context_id, [rpc.rpc_sync("b", forward, args=(sent,)).sum()])
        return dist_autograd.get_gradients(context_id).get(parameter)

    parameter = nn.Parameter(torch.ones(2, 3))
    lost = in_context(lambda now: gradient_of_sent(parameter, parameter, now))
    found = in_context(lambda now: gradient_of_sent(parameter, parameter.view_as(parameter), now))
    note_event("A Parameter or a Module gets no gradient", lost is None and found is not None)

    def from_another_thread(context_id):
        losses, weight = [], torch.ones(1, requires_grad=True)
        thread = threading.Thread(target=lambda: losses.append(forward_there()))
        thread.start()
        thread.join()
        dist_autograd.backward(context_id, [losses[0] * weight.sum()])
        return weight in dist_autograd.get_gradients(context_id), rpc.rpc_sync("b", gradients, args=(context_id,))

    note_event("The loss does not fall", in_context(from_another_thread) == (True, 0))


def one_name(rank):
    note_error("RPC worker name observer", lambda: join(rank, name="observer"))


def taken_port(rank):
    with socket.create_server(("0.0.0.0", 0)) as other:
        os.environ["MASTER_PORT"] = str(other.getsockname()[1])
        if rank == 0:
            note_error("code: -98", lambda: join(rank))


def alone(rank):
    if rank == 0:
        note_event("`init_rpc` does not return", still_waits(lambda: join(rank), 1))


def killed(rank):
    join(rank)
    if rank == 1:
        time.sleep(60)
    victim = rpc.rpc_sync("b", os.getpid)
    waiting = rpc.rpc_async("b", time.sleep, args=(30,))
    time.sleep(0.2)
    os.kill(victim, signal.SIGKILL)
    note_error("eof (this error", waiting.wait)
    note_event("`shutdown` does not return", still_waits(rpc.shutdown, 2))


def no_thread_left(rank):
    join(rank, num_worker_threads=2)
    if rank == 1:
        time.sleep(60)
    note_event("does not even time out", still_waits(lambda: rpc.rpc_sync("b", nested, args=(9,), timeout=0.5), 2))


def own_rref(rank):
    join(rank)
    if rank == 1:
        time.sleep(60)
    rref = rpc.remote("a", time.sleep, args=(0.3,), timeout=0.1)
    note_event("`to_here()` waits forever", still_waits(lambda: rref.to_here(timeout=0.5), 2))


def unused_result(rank):
    join(rank)
    if rank == 1:
        time.sleep(60)
    with dist_autograd.context() as context_id:
        used, _unused = (rpc.rpc_sync("b", forward, args=(torch.ones(2, 3),)).sum() for _ in range(2))
        waits = still_waits(lambda: dist_autograd.backward(context_id, [used]), 2)
    weight = torch.ones(3, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = weight.sum()
        rpc.rpc_sync("b", id, args=(loss,))  # its answer does not depend on the loss
        waits = waits and still_waits(lambda: dist_autograd.backward(context_id, [loss]), 2)
        note_event("`dist_autograd.backward` does not return", waits)


def collective(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    join(rank)
    if rank == 1:
        time.sleep(60)
    future = rpc.rpc_async("b", sum_over_ranks, timeout=0)
    waited = still_waits(future.wait, 1)
    note_event("An RPC and a collective", waited and sum_over_ranks() == future.wait() == 2)


def second_group(rank):
    for group in 1, 2:
        join(rank)
        if rank == 0:
            rref = rpc.remote("b", Agent)
            note_error("no longer running", lambda rref=rref: rpc.rpc_sync("b", type, args=(rref,)))
            if group == 1:
                assert "no longer running" not in SEEN
        meeting.wait()
        rpc.shutdown(graceful=False)
        meeting.wait()


def join_dynamic(name, rank):
    """Join a group without a fixed size, whose store is in the process of "a"."""
    rpc.init_rpc(name, rank=rank, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=2))


def dynamic_group(rank):
    """Return when "b" is in a group without a fixed size; return the store, in the process of "a"."""
    store = None
    if rank == 0:  # multi_tenant: init_rpc uses this store
        port = int(os.environ["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
    meeting.wait()
    if rank == 1:
        join_dynamic("b", 1)
    meeting.wait()
    return store


def join_after_a_kill(rank):
    store = dynamic_group(rank)
    if rank == 1:
        dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])).set("pid of b", str(os.getpid()))
        time.sleep(60)
    victim = os.pidfd_open(int(store.get("pid of b")))
    signal.pidfd_send_signal(victim, signal.SIGKILL)
    select.select([victim], [], [])  # returns when b has ended
    note_error("wait timeout after", lambda: join_dynamic("a", 0))
    del store


def join_with_a_number_in_use(rank):
    store = dynamic_group(rank)
    if rank == 1:
        time.sleep(60)
    note_error("RPC worker id 1", lambda: join_dynamic("a", 1))
    del store


def owner_has_left(rank):
    store = dynamic_group(rank)
    if rank == 0:
        join_dynamic("a", 0)
        rref = rpc.remote("b", Agent)
        rref.to_here()
    meeting.wait()
    if rank == 1:
        rpc.shutdown()
    meeting.wait()
    if rank == 0:
        note_error("could not find destination id", rref.to_here)
        del store


def without_rpc(rank):
    del torch._C._rpc_init  # as in a build of torch without RPC
    for name in [name for name in sys.modules if name.startswith("torch.distributed.rpc")]:
        del sys.modules[name]
    import torch.distributed.rpc as bare

    note_error("module 'torch.distributed.rpc'", lambda: bare.rpc_sync)


def nameless_host(rank):
    """A host whose own name does not resolve."""
    socket.sethostname("elsewhere.invalid")
    with stderr_of_cpp("Failed to look up the IP address"):
        join(rank)
        rpc.shutdown()


def run_scene(scene, rank, port, answers):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)  # not before the fork: torch then sometimes aborts with "Invalid thread pool"
    scene(rank)
    if rank == 0:
        answers.send(SEEN)
    os._exit(0)  # after some scenes shutdown would wait forever


def start_scene(scene):
    """Start a scene. Return its two processes, and the end of a pipe through which rank 0 sends what it has seen."""
    global meeting
    fork = multiprocessing.get_context("fork")
    meeting = fork.Barrier(2)  # of the two processes of this scene
    meetings.append(meeting)  # else the next scene's Barrier could get the same shared memory
    port = free_port()
    answers, sent = fork.Pipe(duplex=False)
    processes = [fork.Process(target=run_scene, args=(scene, rank, port, sent)) for rank in range(2)]
    for process in processes:
        process.start()
    sent.close()
    return processes, answers


def main():
    # All of them at once would be too many processes for a small machine.
    run_at_once([calls, one_name, taken_port, alone, killed, no_thread_left, without_rpc])
    run_at_once([own_rref, unused_result, collective, second_group])
    run_at_once([join_after_a_kill, join_with_a_number_in_use, owner_has_left])
    if "nameless_host" in sys.argv:
        run_at_once([nameless_host])
    print(json.dumps(SEEN))


def run_at_once(scenes):
    started = [start_scene(scene) for scene in scenes]
    for processes, answers in started:
        multiprocessing.connection.wait([answers, processes[0].sentinel])
        SEEN.update(answers.recv() if answers.poll() else {})  # {} if it has died: then the tests of its entries fail
        for process in processes:
            process.kill()


if __name__ == "__main__":
    main()
