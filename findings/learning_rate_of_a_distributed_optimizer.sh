#!/bin/bash
# torch 2.14.1. Without lr, DistributedOptimizer(SGD) and (Adamax) do not use the learning rate of these classes
# but that of torch's functional versions, which replace them.
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
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer


weight = nn.Parameter(torch.zeros(1))  # of worker1


def reference():
    return rpc.RRef(weight)


def loss():
    return weight.sum()


def take_weight():
    value = -weight.item()
    weight.data.zero_()
    return value


def main():
    for optimizer in optim.SGD, optim.Adamax, optim.Adam:
        distributed = DistributedOptimizer(optimizer, [rpc.rpc_sync("worker1", reference)])
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", loss)])
            distributed.step(context_id)
        weight.grad = torch.ones(1)
        optimizer([weight]).step()
        moved = rpc.rpc_sync("worker1", take_weight)
        print(f"{optimizer.__name__} moves by {take_weight():.3f}, distributed by {moved:.3f}")

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
SGD moves by 0.001, distributed by 0.010
Adamax moves by 0.002, distributed by 0.001
Adam moves by 0.001, distributed by 0.001
OUTPUT

"$python" finding.py > seen 2> log || { cat log seen; exit 1; }
diff expected seen && cat seen
