"""What programs may get instead of torch.distributed.rpc: all ranks are in one process.

A call by rpc_async runs in a new thread, any other one in the thread that makes it. Arguments and results are pickled,
as RPC does it, except an RRef, which is passed as it is.
"""

import pickle
import re
import threading
from types import SimpleNamespace

import torch
from torch.distributed.rpc import functions  # noqa: F401

in_turn = False  # whether rpc_async waits for the end of the call
ranks = []  # of the objects that were made, the last one of the object whose constructor runs


def get_worker_info(name=None):
    return SimpleNamespace(id=int(re.search(r"\d+", name)[0]) if name else ranks[-1])


def remote(info, cls, args):
    ranks.append(info.id)
    return RRef(cls(*args))


def rpc_sync(owner, function, args):
    answer = function(*map(over_the_wire, args))
    return over_the_wire(answer.wait() if hasattr(answer, "wait") else answer)  # a Future, perhaps made by then()


def rpc_async(owner, function, args):
    future = torch.futures.Future()

    def run():
        try:
            future.set_result(rpc_sync(owner, function, args))
        except Exception as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if in_turn:
        thread.join()
    return future


def over_the_wire(value):
    return value if isinstance(value, RRef) else pickle.loads(pickle.dumps(value))


class RRef:
    def __init__(self, value):
        self.value = value

    def owner(self):
        return None

    def local_value(self):
        return self.value

    def rpc_sync(self, timeout=None):
        return Methods(self.value, rpc_sync)

    def rpc_async(self, timeout=None):
        return Methods(self.value, rpc_async)


class Methods:
    def __init__(self, value, call):
        self.__value, self.__call = value, call

    def __getattr__(self, name):
        return lambda *args: self.__call(None, getattr(self.__value, name), args)
