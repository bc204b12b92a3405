#!/bin/bash
# torch 2.14.1. A Sequential holds a RemoteModule. Its eval() raises nothing and switches its local layers to
# evaluation. The remote layer stays in training, while parameters() and state_dict() are refused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python=${FINDINGS_PYTHON:-$folder/environment/bin/python}
if [ -z "${FINDINGS_PYTHON:-}" ]; then
    python3 -m venv environment
    "$python" -m pip install --quiet torch==2.14.1 numpy==2.4.6
fi

cat > finding.py <<'PROGRAM'
import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.nn import RemoteModule


def is_training(rref):
    return rref.local_value().training


def main():
    remote = RemoteModule("worker1", nn.Dropout)
    model = nn.Sequential(remote, nn.Dropout())
    model.eval()
    there = rpc.rpc_sync("worker1", is_training, args=(remote.get_module_rref(),))
    print(f"in training: the Sequential {model.training}, its local layer {model[1].training}, the remote one {there}")
    print("the remote dropout drops:", 0 in remote(torch.ones(1000)))
    for method in model.parameters, model.state_dict:
        try:
            list(method())
        except ValueError as error:
            print(error)

def run(rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + os.path.abspath("store"))
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        main()
    rpc.shutdown()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    mp.start_processes(run, nprocs=2, start_method="fork")
PROGRAM

cat > expected <<'OUTPUT'
in training: the Sequential False, its local layer False, the remote one True
the remote dropout drops: True
Method ``named_modules`` not supported for RemoteModule
Method ``state_dict`` not supported for RemoteModule
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
