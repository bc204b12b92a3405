"""What asked.py and errors.py share. Each of them runs one of its scenes: python asked.py SCENE.

A scene is an RPC group of two processes. "a" runs the scene, which asserts what the pages say, and "b" serves its
calls.
"""

import os
import sys
import time
import traceback
import warnings

import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

from documented import assert_documented

SCENES = {}  # name -> its function, and the one that both processes call before it


def join(rank, rpc_timeout=20, **options):
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, **options)
    rpc.init_rpc("ab"[rank], rank=rank, world_size=2, rpc_backend_options=options)


def stay_alone(rank):
    pass


def scene(entry=None, begin=join):
    """Register the decorated function as a scene. `entry`: the one of docs/TROUBLESHOOTING.md that it shows."""

    def register(function):
        SCENES[function.__name__] = function, begin
        return function

    return register


def call(function, *args, **options):
    return rpc.rpc_sync("b", function, args=args, **options)


def error_of(function):
    """Return the exception that `function()` raises."""
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it has raised no exception")


def said(function):
    error = error_of(function)
    return f"{type(error).__name__}: {error}"


def says(symptom, function):
    """Assert that `function()` raises the exception which docs/TROUBLESHOOTING.md shows where this piece stands."""
    assert_documented(said(function), symptom)


def warns(symptom, function):
    """Assert the same of a warning."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        function()
    assert_documented("\n".join(f"{each.category.__name__}: {each.message}" for each in warned), symptom)


def run(rank, name):
    function, begin = SCENES[name]
    begin(rank)
    if rank == 1:
        time.sleep(600)  # until it is killed
    try:
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # after some scenes RPC would wait forever


def main():
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    ranks = [mp.get_context("fork").Process(target=run, args=(rank, sys.argv[1])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    ranks[0].join()
    ranks[1].kill()
    sys.exit(ranks[0].exitcode)
