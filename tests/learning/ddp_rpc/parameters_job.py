"""Print the `parameters()` of a model whose embedding table is behind an RRef, and of one with a RemoteModule.

This is one process: it is the only RPC worker and the only trainer, and it calls itself as its server.
"""

import os
import pathlib
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.nn import RemoteModule

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "ddp_rpc"))
from hogwild import EmbeddingShard, HybridModel


def main():
    os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    warnings.filterwarnings("ignore", "You are using a Backend")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", _transports=["uv"])
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        keywords = {"sparse": False, "seed": 1, "device": "cpu"}
        model = HybridModel([rpc.remote("worker", EmbeddingShard, (0, 1, 30, 5), keywords)], 5, torch.device("cpu"))
        print("RRef:", [tuple(parameter.shape) for parameter in model.parameters()])
        model.remote_emb_module = RemoteModule("worker/cpu", torch.nn.EmbeddingBag, (30, 5))
        try:
            list(model.parameters())
        except ValueError as error:
            print("RemoteModule:", error)
        rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
