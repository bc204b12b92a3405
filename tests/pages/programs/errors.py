"""What the exceptions of failed calls say, as in the table of recipe 14, and what the recipe makes of them."""

import functools
import os
import signal
import time

import torch.distributed.rpc as rpc
from recipes_14 import what_happened
from scenes import error_of, join, main, scene

from pages import Page

TABLE = Page("docs/RECIPES.md").text.partition("\n## 14. ")[2]


def work(task):
    if task == "raises":
        raise KeyError(task)
    if task == "returns what cannot be pickled":
        return lambda: None
    if task == "takes long":
        time.sleep(3)
    if task == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)


def check(error, what, words):
    text = " ".join(str(error).split()).replace("name=b)", "name=worker1)")
    assert what_happened(error) == what and words in text and f"`{words}`" in TABLE, text


def check_all():
    def error_of_work(task):
        error = error_of(rpc.rpc_async("b", work, (task,), timeout=1).wait)
        assert type(error) is RuntimeError
        return error

    check(error_of_work("raises"), "failed", "On WorkerInfo(id=1, name=worker1):")
    of_result = error_of_work("returns what cannot be pickled")
    check(of_result, "failed", "local object 'work.<locals>.<lambda>'")
    assert "On WorkerInfo" not in str(of_result)
    check(error_of(lambda: rpc.rpc_async("b", work, (lambda: None,))), "failed", "local object")
    check(error_of_work("takes long"), "timed out", "RPC ran for more than set timeout")
    killed = error_of_work("is killed")
    check(killed, "lost", "this error originated at tensorpipe")
    assert str(killed).startswith(("EOF: end of file", "ECONNRESET", "ECONNREFUSED", "eof"))


@scene(begin=functools.partial(join, _transports=["uv"]))
def over_tcp():
    check_all()


@scene(begin=functools.partial(join, _transports=["shm"]))
def over_shm():
    check_all()


if __name__ == "__main__":
    main()
