"""What users of torch RPC ask: each answer of the pages is tried, by asked.py and by short programs."""

import json
import os
import re
import sys
import textwrap

import pytest

from documented import agrees, assert_documented, entry_of, message_of
from forks import run_in_forks
from helpers import ROOT
from programs import run_script

CONCEPTS = (ROOT / "docs" / "CONCEPTS.md").read_text()
(WHERE_SHUTDOWN_STANDS,) = re.findall(r"^```python\n(rpc.init_rpc.*?)^```", CONCEPTS, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def answers():
    done = run_script("tests/pages/programs/asked.py", env={"TORCH_CPP_LOG_LEVEL": "WARNING"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


pytestmark = pytest.mark.xdist_group("asked")


def test_the_message_of_an_entry_is_what_torch_says(answers):
    assert_documented(answers["RRef before init_rpc"], "Current RPC agent is not set")
    assert_documented(answers["RRef after shutdown"], "has been deleted")
    assert_documented(answers["shutdown in finally"], "During handling of the above")
    assert_documented(answers["RRef called"], "'RRefProxy' object")
    assert_documented(answers["attribute called"], "type object 'Net'")
    assert_documented(answers["generator returned"], "cannot pickle 'generator'")
    assert_documented(answers["DDP in two calls"], "Expected to have finished reduction")
    assert_documented(answers["scheduler"], "DistributedOptimizer is not an")
    assert_documented(answers["followers"], "Followers […]")
    assert_documented(answers["torch.profiler"], "Profiling a distributed call")
    assert len(answers["operators refused"]) == 4
    for text in answers["operators refused"]:
        assert_documented(text, "Overloaded torch operator")


def test_what_is_called_through_an_rref_is_a_method_of_the_class(answers):
    assert answers["attribute read"] == "partial" and answers["module returned"] == "Net"
    assert answers["method called"] == [1, 2] and answers["function with local_value"] == "Linear"


def test_operators_take_their_arguments_strictly_and_return_one_value(answers):
    assert answers["operators"] == [[[1, 1], [1, 1]], [2, 2]]
    assert all("should be a single IValue" in text for text in answers["operators with several results"])


def test_what_can_be_sent(answers):
    sent = {"partial": 6, "bound": 3, "built-in": 2, "cached": 2, "compiled": 2, "class": "Multiplier", "its own": 2}
    assert answers["sent"] == sent  # "its own": the object of the bound method was copied
    later, generator, a_lambda = answers["not sent"]
    assert "cannot pickle 'coroutine' object" in later and "cannot pickle 'generator' object" in generator
    assert "local object" in a_lambda


def test_an_rref_is_refused_by_pickle_and_travels_by_rpc(answers):
    assert all(agrees(message_of("Can not pickle rref"), text) for text in answers["RRef copied"])
    assert len(answers["RRef copied"]) == 4 and answers["RRef sent in an object"] == [1, 2]


def test_the_largest_timeout(answers):
    assert all("(-2147483648 ms)" in text for text in answers["timeouts too large"])
    assert answers["timeouts"] == [2, 2, 2]


def test_a_timeout_that_is_over_before_the_constructor_spoils_the_rref(answers):
    first, copied, afterwards = answers["late constructor"]
    assert "more than set timeout (200 ms)" in first and first == afterwards and copied == "late"


def test_a_thread_that_waits_lets_others_use_python(answers):
    assert answers["ways to wait"] == [2, 2, 2, 2]


def test_what_belongs_to_a_thread_and_what_to_the_process(answers):
    """Grad mode, default device, autocast; default dtype, deterministic algorithms."""
    assert entry_of("A setting from the constructor is gone")
    early = answers["set before init_rpc"]
    assert early == {"thread": [False] * 3, "process": [True] * 2}
    assert answers["number of threads"] == 2  # set before init_rpc
    both = answers["set in a constructor"]  # as two calls see it, which run on two threads
    assert [False] * 3 in both["thread"] and both["process"] == [[True] * 2] * 2


def test_no_grad_in_the_caller_leaves_a_call_in_the_context(answers):
    assert all("more than set timeout" in text for text in answers["target, no cure"])
    assert answers["target, cured"] == ["None"] * 4


def test_a_gradient_flows_through_containers(answers):
    through = answers["gradient through"]
    assert through.pop("Parameter") is None and through.pop("twice") == [2, 2]
    assert through == {name: [1, 1] for name in ("list", "tuple", "dict", "dataclass")}


def test_optimizers(answers):
    assert answers["default rates"] == [0.01, 0.001, 0.001, 0.002]  # SGD, its subclass, Adamax, its subclass
    assert answers["schedule equals StepLR"] == [True] * 6
    one, two = answers["momenta"]  # of two steps each: -0.1 -0.19 twice, and of four: -0.1 -0.19 -0.271 -0.3439
    assert (one, two) == (-0.9049, -0.58)


def test_the_first_error_stands_above_the_one_of_shutdown(answers):
    first, last = answers["shutdown in finally"].split("During handling")
    assert "is not unique" in first and "RPC has not been initialized" in last


PROGRAM = """
import multiprocessing
import os
import sys
import time

import torch.distributed.rpc as rpc

what = sys.argv[1]
world_size = 2


def run(rank):
    name = "observer" if what == "start" else f"worker{rank}"

    def work():
        if rank == 1:
            time.sleep(60)
        open_call = rpc.rpc_async("worker1", time.sleep, args=(60,))
        if what == "raise":
            raise ValueError("a mistake")
        if what == "exit":
            sys.exit(3)
        return open_call

    WHERE


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    multiprocessing.get_context("fork").Process(target=run, args=(1,), daemon=True).start()
    run(0)
"""


def test_where_shutdown_stands(tmp_path):
    """With the page's lines, a program ends with its own error and status, although a call is open."""
    (tmp_path / "program.py").write_text(PROGRAM.replace("    WHERE", textwrap.indent(WHERE_SHUTDOWN_STANDS, "    ")))
    errors = {"start": "is not unique", "raise": "ValueError: a mistake", "exit": ""}
    done = run_in_forks(tmp_path, [f"program.py {what}" for what in errors], at_once=3)
    for what, error in errors.items():
        ended = done[f"program.py {what}"]
        assert ended.returncode == (3 if what == "exit" else 1), ended.stderr
        assert error in ended.stderr and "During handling" not in ended.stderr


SEND = """
import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp


def run(rank):
    options = rpc.TensorPipeRpcBackendOptions(_transports=["shm"], _channels=["basic"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        room = os.statvfs("/dev/shm")
        print(room.f_frsize * room.f_blocks, rpc.rpc_sync("worker1", torch.sum, args=(torch.ones(5_000_000),)).item())
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    mp.start_processes(run, nprocs=2, start_method="fork")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_the_shm_transport_does_not_use_dev_shm(tmp_path):
    """20 MB travel over it where /dev/shm has room for 1 MB."""
    (tmp_path / "send.py").write_text(SEND)
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" "$@"'
    done = run_in_forks(tmp_path, ["send.py"], by=["unshare", "--mount", "sh", "-c", mount, sys.executable])["send.py"]
    assert done.stdout.split() == ["1048576", "5000000.0"], done.stderr
