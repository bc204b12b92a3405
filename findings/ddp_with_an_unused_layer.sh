#!/bin/bash
# torch 2.14.1. DDP with find_unused_parameters=True and a layer that the loss does not use: an ordinary backward pass
# works, and one of distributed autograd fails with an internal assert.
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
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(2, 1)
        self.unused = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)


def run(rank):
    here = os.path.abspath("")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{here}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{here}/gloo")
    model = DistributedDataParallel(TwoLayers(), find_unused_parameters=True)
    model(torch.ones(1, 2)).sum().backward()
    ordinary = model.module.used.weight.grad
    with dist_autograd.context() as context_id:
        try:
            dist_autograd.backward(context_id, [model(torch.ones(1, 2)).sum()])
            message = "no error"
        except RuntimeError as error:
            message = str(error)
    if rank == 0:
        print("ordinary backward pass:", ordinary)
        print("in a context:", "INTERNAL ASSERT" in message)
    rpc.shutdown()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.14.1", torch.__version__
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    mp.start_processes(run, nprocs=2, start_method="fork")
PROGRAM

cat > expected <<'OUTPUT'
ordinary backward pass: tensor([[1., 1.]])
in a context: True
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
