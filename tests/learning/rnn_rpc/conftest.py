"""One RPC group for the tests of this folder: this process is `trainer`, and three other processes are servers.

What uses it has the mark xdist_group("rnn_rpc"), so that it is started once.
"""

import os
import subprocess
import sys

import pytest
import torch.distributed.rpc as rpc

from helpers import ROOT

SERVERS = ("ps", "server1", "server2")  # `ps` is that of tutorial.py
SERVE = """
import sys
import torch.distributed.rpc as rpc
name, rank, store = sys.argv[1:]
options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", _transports=["uv"], _channels=["basic"])
rpc.init_rpc(name, rank=int(rank), world_size=4, rpc_backend_options=options)
rpc.shutdown()
"""


@pytest.fixture(scope="session")
def rpc_group(tmp_path_factory):
    """Join the group, once for all tests, because RRefs do not work in a second RPC group of the same process."""
    store = tmp_path_factory.mktemp("rpc") / "store"
    tcp = {"_transports": ["uv"], "_channels": ["basic"]}  # as with --transport tcp: the kernel counts every byte
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", **tcp)
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            patch.setenv(variable, "lo")
        environment = os.environ | {"PYTHONPATH": str(ROOT / "rnn_rpc"), "TORCH_CPP_LOG_LEVEL": "FATAL"}
        command = [sys.executable, "-W", "ignore", "-c", SERVE]
        servers = [
            subprocess.Popen([*command, name, str(rank), str(store)], env=environment)
            for rank, name in enumerate(SERVERS, 1)
        ]
        try:
            rpc.init_rpc("trainer", rank=0, world_size=4, rpc_backend_options=options)
            yield
            rpc.shutdown()
        finally:
            for server in servers:
                server.kill()
                server.wait()
